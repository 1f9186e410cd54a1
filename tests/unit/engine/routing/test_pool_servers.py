"""The servers of a pool are found by name, address and index."""

from __future__ import annotations

import pytest
from pool_fixtures import pool_gateway, set_healthy

from evoke_proxy.errors import RequestError


def test_a_server_is_found_by_its_name_and_its_address() -> None:
    servers = pool_gateway().servers
    assert len(servers) == 2 and [servers.name(at) for at in range(2)] == ["a", "b"]
    assert [servers.index_of(name) for name in "ab"] == [0, 1]
    assert [servers.at_url(servers[at].upstream.url) for at in range(2)] == [0, 1]
    assert servers.at_url("http://three:3") is None
    with pytest.raises(RequestError, match="no server is called 'c': a, b") as raised:
        servers.index_of("c")
    assert raised.value.status == 404


def test_only_servers_that_take_requests_are_available() -> None:
    gateway = pool_gateway()
    assert gateway.servers.available == []
    set_healthy(gateway, 0, 1)
    assert gateway.servers.available == [0, 1]
    gateway.servers.pool.drain(0, True)
    assert gateway.servers.available == [1]
