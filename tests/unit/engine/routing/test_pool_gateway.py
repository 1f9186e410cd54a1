"""The pool gateway, without servers: routes, failover, migration, health checks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_fixtures import CHAT_BODY, parsed_request, pool_gateway, set_healthy
from session_fixtures import session_record

from evoke_proxy.config import Config, PoolConfig
from evoke_proxy.core.session.identity import Hint
from evoke_proxy.engine.gateway import Exchange, RequestTrace
from evoke_proxy.engine.parsing.request import tenant_of
from evoke_proxy.engine.routing.pool_gateway import Origin, PoolGateway
from evoke_proxy.engine.strategies.budgeted.session_records import _belongs_to
from evoke_proxy.errors import ConfigError, NoServer, RequestError, UpstreamUnavailable

NAMED = {"X-Evoke-Session": "mine"}


WORDS = (
    *("role", "content", "text", "type", "tool_calls", "function", "name", "arguments", "id"),
    *("input", "output", "user", "assistant", "tool_use", "tool_result", "reasoning_content"),
)


def _origin(dialect: str, body: bytes, headers: dict[str, str]) -> Origin:
    try:
        return Origin.of(parsed_request(dialect, body, headers))
    except RequestError:
        return Origin(tenant_of(headers))


def _records(gateway: PoolGateway, at: int) -> Any:
    return gateway.servers[at].server.strategies.budgeted._records


def test_a_recorded_session_is_routed_to_its_server_by_name() -> None:
    gateway = pool_gateway()
    conversation = replace(session_record(), hint=Hint("mine", "X-Evoke-Session"))
    gateway.servers[1].conversations.recall(conversation)
    tenant = conversation.session.tenant
    origin = replace(_origin("chat", CHAT_BODY, NAMED), tenant=tenant)
    route = gateway._find_route(origin)
    assert route is not None and (route.server, route.session) == (1, conversation.session.id)
    assert gateway._find_route(origin) is route, (
        "the route is remembered even if no server accepts the request"
    )
    assert gateway._affinity.bound == [0, 1]
    assert gateway._find_route(replace(origin, name="other")) is None
    assert gateway._find_route(replace(origin, tenant="other")) is None


def test_records_are_loaded_at_the_server_they_belong_to() -> None:
    gateway = pool_gateway()
    for home, expected in (("http://one:1", [0]), ("http://two:2", [1]), ("http://gone:3", [0])):
        records = [_records(gateway, at) for at in range(2)]
        indices = [
            at for at in range(2) if _belongs_to(home, records[at]._home, records[at]._homes)
        ]
        assert indices == expected


def test_a_request_fails_over_until_no_server_is_left() -> None:
    async def passed() -> None:
        gateway = pool_gateway()
        set_healthy(gateway, 0, 1)
        refused = UpstreamUnavailable("no", "http://one:1", reached=False)
        tried: dict[int, int] = {}
        assert gateway.choice.fail_over(0, tried, refused) == 1
        with pytest.raises(NoServer) as none:
            gateway.choice.fail_over(
                1, tried, UpstreamUnavailable("no", "http://two:2", reached=False)
            )
        assert none.value.retry_after >= 1 and none.value.status == 503
        assert "2 failed just now" in str(none.value)
        sample = gateway.metrics.registry.get_sample_value
        assert sample("evoke_server_failovers_total", {"server": "a"}) == 1
        assert sample("evoke_server_failovers_total", {"server": "b"}) == 0
        breaker = gateway.servers.pool.members[0].breaker
        assert (breaker.failures, breaker.unconfirmed) == (0, 1), "a check must confirm the failure"

    asyncio.run(passed())


def test_a_request_that_broke_two_connections_is_not_sent_to_a_third_server(
    monkeypatch: Any,
) -> None:
    urls = ("a=http://one:1", "b=http://two:2", "c=http://three:3")
    request = parsed_request("chat", CHAT_BODY, {})

    async def sent(reached: bool) -> int:
        gateway, origin = pool_gateway(Config(pool=PoolConfig(urls))), list[int]()
        pool = gateway.servers.pool
        assert pool.due_checks(0.0)
        for at in range(3):
            pool.check_passed(at, 0.0, 1, "m")

            @asynccontextmanager
            async def broken(*_: object, at: int = at) -> AsyncIterator[Exchange]:
                origin.append(at)
                raise UpstreamUnavailable("it broke off", f"http://{at}", reached=reached)
                yield

            monkeypatch.setattr(gateway.servers[at], "exchange", broken)
        with pytest.raises(UpstreamUnavailable if reached else NoServer):
            async with gateway.exchange(request, RequestTrace(0.0)):
                pytest.fail("it was answered")
        assert len(set(origin)) == len(origin)
        return len(origin)

    assert asyncio.run(sent(reached=True)) == 2
    assert asyncio.run(sent(reached=False)) == 3


def test_an_unreadable_request_goes_to_any_server() -> None:
    assert _origin("chat", b"not JSON", {}) == _origin("chat", b'{"evoke_budget":-1}', {})
    assert _origin("chat", CHAT_BODY, NAMED).name == "mine"
    keys = [{"Authorization": f"Bearer {odd}"} for odd in ("\udcff", "\udcfe")]
    assert len({_origin("chat", CHAT_BODY, key).tenant for key in keys} - {""}) == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=12,
)


BODIES = st.dictionaries(st.sampled_from(("messages", "input", "system", "prompt", "user")), JSON)


@given(st.sampled_from(("chat", "responses", "messages", "completions")), BODIES)
def test_any_body_has_a_stable_origin(dialect: str, body: dict[str, object]) -> None:
    origin = _origin(dialect, json.dumps(body).encode(), {})
    assert origin == _origin(dialect, json.dumps(body).encode(), {}), "the origin must not change"
    assert origin.tenant == _origin("chat", CHAT_BODY, {}).tenant


@pytest.mark.parametrize(
    ("upstreams", "expected"),
    [
        (["http://h:1", "x=http://h:2/"], {"h:1": "http://h:1", "x": "http://h:2"}),
        (["https://gpu-box"], {"gpu-box": "https://gpu-box"}),
        (["http://h:1/a=b"], {"h:1": "http://h:1/a=b"}),
        (["v6=http://[::1]:9"], {"v6": "http://[::1]:9"}),
        (["http://[::1]:9"], None),
        (["a=ftp://h:1"], None),
        (["a b=http://h:1"], None),
        (["a=http://h:1", "a=http://h:2"], None),
        (["a=http://h:1", "b=http://h:1/"], None),
        (["h:1"], None),
        (["http://h:none"], None),
    ],
)
def test_the_names_of_servers_come_from_the_configuration_or_their_address(
    upstreams: list[str], expected: dict[str, str] | None
) -> None:
    config = PoolConfig(tuple(upstreams))
    if expected is None:
        with pytest.raises(ConfigError, match="pool.upstreams"):
            config.servers  # noqa: B018
    else:
        assert config.servers == expected
