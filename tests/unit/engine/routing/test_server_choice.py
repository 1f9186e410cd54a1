"""The server of a request, and the next one when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from pool_fixtures import pool_gateway, set_healthy

from evoke_proxy.core.servers.affinity import Route
from evoke_proxy.engine.routing.server_choice import ServerChoice
from evoke_proxy.errors import NoServer, UpstreamUnavailable


def chosen(use: Callable[[ServerChoice, Any], None], *healthy: int) -> None:
    """Call `use` with a choice between two servers, of which these are healthy, and the gateway."""

    async def work() -> None:
        gateway = pool_gateway()
        set_healthy(gateway, *healthy)
        use(gateway.choice, gateway)

    asyncio.run(work())


def test_a_conversation_stays_at_its_server_while_that_is_healthy() -> None:
    def both(choice: ServerChoice, _: Any) -> None:
        assert [choice.choose(Route(server)) for server in (1, 0)] == [1, 0]

    def one(choice: ServerChoice, _: Any) -> None:
        assert choice.choose(Route(1)) == choice.choose() == 0

    chosen(both, 0, 1)
    chosen(one, 0)


def test_without_a_healthy_server_the_error_names_their_states_and_when_to_retry() -> None:
    def none(choice: ServerChoice, _: Any) -> None:
        with pytest.raises(NoServer, match="0 of 2 llama-servers take requests") as raised:
            choice.choose()
        assert raised.value.retry_after > 0

    chosen(none)


def test_each_server_is_tried_once_and_its_failure_is_counted() -> None:
    def fail(choice: ServerChoice, gateway: Any) -> None:
        tried: dict[int, int] = {}
        error = UpstreamUnavailable("refused", "http://one:1")
        assert choice.fail_over(0, tried, error) == 1
        with pytest.raises(NoServer, match="2 failed just now"):
            choice.fail_over(1, tried, UpstreamUnavailable("refused", "http://two:2"))
        assert set(tried) == {0, 1}
        value = gateway.metrics.registry.get_sample_value
        assert value("evoke_server_failovers_total", {"server": "a"}) == 1
        assert not value("evoke_server_failovers_total", {"server": "b"})

    chosen(fail, 0, 1)
