"""The states of the servers of a pool: in words, as events, and as metrics."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pool_fixtures import pool_gateway, set_healthy


def test_a_state_is_published_once_when_it_changes(
    caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    caplog.set_level(logging.INFO)
    gateway = pool_gateway()
    states, pool, events = gateway._states, gateway.servers.pool, list[dict[str, Any]]()
    monkeypatch.setattr(gateway.feed, "publish", lambda kind, **facts: events.append(facts))
    states.publish_changes()
    assert events == [], "nothing is published before the first check"
    set_healthy(gateway, 0, 1)
    states.publish_changes()
    states.publish_changes()
    assert events == [{"server": name, "state": "is well"} for name in "ab"]
    events.clear()
    pool.drain(0, True)
    states.publish_changes()
    for _ in range(gateway.config.pool.failures):
        pool.check_failed(1, 0.0)
    states.breaker_opened(1, "refused")
    assert [event["state"] for event in events] == ["drains", "is away"]
    assert states.described() == "0 of 2 llama-servers take requests: a drains, b is away"
    assert [it.getMessage() for it in caplog.records][-1] == "server b is away: refused"


def test_the_gauges_of_a_server_are_read_at_each_scrape() -> None:
    gateway = pool_gateway()
    pool = gateway.servers.pool

    def value(name: str) -> float | None:
        return gateway.metrics.registry.get_sample_value(name, {"server": "b"})

    assert (value("evoke_server_up"), value("evoke_server_breaker_openings_total")) == (0, 0)
    set_healthy(gateway, 0, 1)
    pool.drain(1, True)
    assert (value("evoke_server_up"), value("evoke_server_draining")) == (1, 1)
    with gateway.requests.counted(1):
        assert value("evoke_server_requests_in_flight") == 1
    gateway._states.breaker_opened(1, "")
    assert value("evoke_server_breaker_openings_total") == 1
