"""Fixtures of the client tests: a server for direct requests, and a proxy in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from comparison import Ask, AskBoth, empty_slots, erasable_server, without_volatile
from harness import RunningProxy, proxy


@pytest.fixture(scope="session")
def direct_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A patched llama-server with one slot, asked without the proxy."""
    with erasable_server(tmp_path_factory.mktemp("slots")) as port:
        yield port


@pytest.fixture
def between(direct_port: int) -> Iterator[RunningProxy]:
    """A proxy of its own in front of it."""
    with proxy(direct_port) as running:
        yield running


@pytest.fixture
def both_sides(direct_port: int, between: RunningProxy) -> AskBoth:
    """Asks directly and through the proxy, from an empty slot each time.

    Gives the two answers without ids, clocks and timings. Whatever is asked through the proxy must
    have been managed by it.
    """

    def run(ask: Ask) -> tuple[Any, Any]:
        empty_slots(direct_port, 0)
        direct = without_volatile(ask(direct_port))
        empty_slots(direct_port, 0)
        proxied = without_volatile(ask(between.port))
        assert between.metric("evoke_tokens_total", kind="decoded") > 0
        assert between.metric("evoke_degraded_total") == 0
        return direct, proxied

    return run
