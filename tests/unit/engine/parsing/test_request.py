"""The tenant of a request, and what a request asks for."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.engine.parsing.request import (
    TENANT,
    IncomingRequest,
    ParsedChat,
    ParsedRequest,
    tenant_of,
)


def chat(headers: dict[str, str] | None = None, **fields: object) -> ParsedChat:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    incoming = IncomingRequest(dialect="chat", body=b"{}", headers=headers or {})
    return ParsedChat(incoming=incoming, tenant="", body=b"{}", chat=parse_chat("chat", body))


def test_the_tenant_of_a_key_of_the_proxy_is_the_one_that_it_names() -> None:
    assert tenant_of({TENANT: "lab", "Authorization": "Bearer other"}) == "lab"
    assert ":" in TENANT, "no header of a client can have this name"


@given(st.text(min_size=1), st.text(min_size=1))
def test_other_keys_are_hashed_and_give_different_tenants(first: str, second: str) -> None:
    tenants = [tenant_of({"Authorization": key}) for key in (first, second)]
    assert all(re.fullmatch("[0-9a-f]{16}", tenant) for tenant in tenants)
    assert (tenants[0] == tenants[1]) == (first == second)
    assert tenants[0] == tenant_of({"X-Api-Key": first})


def test_requests_without_a_key_belong_to_the_empty_tenant() -> None:
    assert tenant_of({}) == tenant_of({"Authorization": ""}) == ""


def test_a_key_with_bytes_that_are_not_utf_8_has_a_tenant() -> None:
    assert tenant_of({"Authorization": "Bearer \udcff"})


def test_only_a_request_that_was_read_streams() -> None:
    incoming = IncomingRequest(dialect="chat", body=b'{"stream":true}', headers={})
    unread = ParsedRequest(incoming=incoming, tenant="", body=b"", unreadable="invalid_json")
    assert not unread.streams
    assert chat(stream=True).streams and not chat().streams


def test_a_client_with_fields_of_the_proxy_or_a_named_session_is_told_what_was_done() -> None:
    assert not chat().is_verbose
    assert chat(evoke_budget=500).is_verbose
    assert chat({"X-Evoke-Session": "mine"}).is_verbose
