"""Which headers of a client are forwarded, and which paths are open to its key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from evoke_proxy.adapters.secret_files import write_secret
from evoke_proxy.config import Config, SecurityConfig, UpstreamConfig
from evoke_proxy.core.tenants.api_keys import Caller, key_of, line_of
from evoke_proxy.engine.parsing.request import TENANT, tenant_of
from evoke_proxy.errors import Forbidden, Unauthenticated
from evoke_proxy.web.client_access import Access

KEY = key_of(bytes(range(32)))
CHAT = "/v1/chat/completions"


@pytest.fixture
def access(tmp_path: Path) -> Access:
    """With one key, of the tenant `lab`, and a key for llama-server."""
    write_secret(tmp_path / "keys", line_of(Caller("alice", "lab"), KEY))
    security = SecurityConfig(keys_file=str(tmp_path / "keys"))
    return Access(replace(Config(), security=security, upstream=UpstreamConfig(api_key="upstream")))


def request(method: str = "POST", path: str = CHAT, key: str = KEY, **headers: str) -> web.Request:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return make_mocked_request(method, path, headers=named | {"Authorization": f"Bearer {key}"})


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", CHAT), ("GET", "/v1/models"), ("POST", "/tokenize?x=1"), ("HEAD", "/props")],
)
def test_a_key_opens_the_paths_of_tenants(access: Access, method: str, path: str) -> None:
    access.check(request(method, path))
    with pytest.raises(Unauthenticated):
        access.check(request(method, path, key="evk_wrong"))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/slots"),
        ("GET", "/%73lots"),
        ("POST", "/v1/chat%2Fcompletions"),
        ("POST", "/slots/0?action=erase"),
        ("POST", "/models/load"),
        ("GET", CHAT),
        ("DELETE", CHAT),
        ("GET", "/"),
    ],
)
def test_what_tenants_share_is_closed_to_their_keys(access: Access, method: str, path: str) -> None:
    with pytest.raises(Forbidden):
        access.check(request(method, path))


def test_health_and_preflight_requests_need_no_key(access: Access) -> None:
    access.check(make_mocked_request("GET", "/health"))
    access.check(make_mocked_request("OPTIONS", CHAT))
    with pytest.raises(Unauthenticated):
        access.check(make_mocked_request("OPTIONS", "/slots"))


def test_without_configured_keys_everything_is_open_and_forwarded() -> None:
    access = Access(Config())
    access.check(make_mocked_request("GET", "/slots"))
    headers = CIMultiDict({"X-Conversation-Id": "1", "Authorization": "Bearer own"})
    assert access.forwarded(headers) == headers


def test_with_keys_only_listed_headers_and_the_key_of_the_proxy_are_forwarded(
    access: Access,
) -> None:
    sent = CIMultiDict(
        {
            "Content-Type": "application/json",
            "X-Conversation-Id": "1",
            "Authorization": f"Bearer {KEY}",
            "X-Api-Key": KEY,
            "Cookie": "c",
        }
    )
    assert dict(access.forwarded(sent)) == {
        "Content-Type": "application/json",
        "Authorization": "Bearer upstream",
    }


def test_the_engine_gets_the_tenant_of_the_key_and_not_the_key(access: Access) -> None:
    checked = request(X_Evoke_Session="mine", X_Api_Key="other")
    access.check(checked)
    headers: Any = access.client(checked)
    assert (headers[TENANT], tenant_of(headers)) == ("lab", "lab")
    assert (headers["X-Evoke-Session"], headers["Authorization"]) == ("mine", "Bearer upstream")
    assert KEY not in str(headers) and "X-Api-Key" not in headers
