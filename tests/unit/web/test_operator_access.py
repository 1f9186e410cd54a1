"""Who may use the admin API: addresses, tokens and host names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evoke_proxy.adapters.secret_files import write_secret
from evoke_proxy.config import Config, SecurityConfig
from evoke_proxy.errors import ConfigError, Forbidden, Unauthenticated
from evoke_proxy.web.operator_access import OperatorAccess

TOKEN = "0123456789abcdef-token"
ADMIN, CLIENT = ("127.0.0.1", 8091), ("127.0.0.1", 8090)


def request(local: tuple[str, int] = ADMIN, host: str = "127.0.0.1:8091", key: str = "") -> Any:
    transport = SimpleNamespace(get_extra_info=lambda name: local if name == "sockname" else None)
    headers = {"Host": host} | ({"Authorization": f"Bearer {key}"} if key else {})
    return SimpleNamespace(transport=transport, host=host, headers=headers)


@pytest.fixture
def with_token(tmp_path: Path) -> OperatorAccess:
    write_secret(tmp_path / "token", TOKEN + "\n")
    security = SecurityConfig(admin_token_file=str(tmp_path / "token"))
    return OperatorAccess(replace(Config(), security=security))


def test_a_token_is_required_where_one_is_configured(with_token: OperatorAccess) -> None:
    with_token.admit(request(key=TOKEN, host="proxy.example.org"))
    for key in ("", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\udcff\u00e9"):
        with pytest.raises(Unauthenticated):
            with_token.admit(request(key=key))


def test_a_token_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    security = SecurityConfig(admin_token_file=str(tmp_path / "missing"))
    with pytest.raises(ConfigError):
        OperatorAccess(replace(Config(), security=security))


@pytest.mark.parametrize("host", ["localhost", "localhost:8091", "127.0.0.1:1", "[::1]:8091"])
def test_without_a_token_an_ip_address_or_localhost_is_admitted(host: str) -> None:
    OperatorAccess(Config()).admit(request(host=host))


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "x@127.0.0.1", "evil.example#@localhost", "a[", ""],
)
def test_without_a_token_the_host_name_of_a_site_is_refused(host: str) -> None:
    with pytest.raises(Forbidden):
        OperatorAccess(Config()).admit(request(host=host))


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:1", "localhost", "10.1.2.3:18090", "[::1]", "proxy:18090"),
        *("evoke-0.evoke.default.svc:1", "evoke.default.svc.cluster.local", "gpu.internal:18090"),
    ],
)
def test_metrics_need_no_token_under_addresses_and_local_names(
    with_token: OperatorAccess, host: str
) -> None:
    with_token.check_scrape(request(host=host))


@pytest.mark.parametrize(
    "host",
    ["evil.example", "svc.evil.example", "evil.example#.svc", "proxy@evil.example", "", "a["],
)
def test_metrics_under_the_name_of_a_site_need_the_token(
    with_token: OperatorAccess, host: str
) -> None:
    with pytest.raises(Forbidden, match="the host must be"):
        with_token.check_scrape(request(host=host))
    with pytest.raises(Forbidden, match="the host must be"):
        with_token.check_scrape(request(host=host, key=TOKEN[:-1]))
    with_token.check_scrape(request(host=host, key=TOKEN))
    with pytest.raises(Forbidden, match="the host must be"):
        OperatorAccess(Config()).check_scrape(request(host=host))


def test_without_a_token_metrics_have_the_host_of_the_admin_api() -> None:
    for host in ("127.0.0.1:1", "localhost"):
        OperatorAccess(Config()).check_scrape(request(host=host))
    with pytest.raises(Forbidden):
        OperatorAccess(Config()).check_scrape(request(host="proxy:18090"))


def test_other_addresses_do_not_serve_the_admin_api(with_token: OperatorAccess) -> None:
    with_token.set_addresses([ADMIN])
    with_token.admit(request(ADMIN, key=TOKEN))
    with pytest.raises(Forbidden):
        with_token.admit(request(CLIENT, key=TOKEN))
    assert with_token.is_admin_address(request(ADMIN))
    assert not with_token.is_admin_address(request(CLIENT))


def test_an_address_of_all_interfaces_includes_the_one_that_the_client_used() -> None:
    access = OperatorAccess(Config())
    assert not access.is_admin_address(request(ADMIN)), "no address is reserved before the start"
    access.set_addresses([("0.0.0.0", 8091)])
    assert access.is_admin_address(request(("192.0.2.7", 8091)))
    assert not access.is_admin_address(request(("192.0.2.7", 8090)))


def test_a_connection_that_was_closed_is_at_no_admin_address() -> None:
    access = OperatorAccess(Config())
    access.set_addresses([ADMIN])
    closed = request()
    closed.transport = None
    assert not access.is_admin_address(closed)
    with pytest.raises(Forbidden):
        access.admit(closed)
