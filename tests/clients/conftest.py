"""Fixtures of the client library tests: a llama-server, and a proxy in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from comparison import Ask, AskBoth, empty_slots, erasable_server, without_volatile
from harness import RunningProxy, proxy


@pytest.fixture(scope="session")
def direct_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a patched llama-server with one slot."""
    with erasable_server(tmp_path_factory.mktemp("slots")) as port:
        yield port


@pytest.fixture
def running(direct_port: int) -> Iterator[RunningProxy]:
    """A new proxy in front of the server."""
    with proxy(direct_port) as running:
        yield running


@pytest.fixture
def ask_both(direct_port: int, running: RunningProxy) -> AskBoth:
    """Send a request directly and through the proxy, each time from an empty slot.

    Returns both answers without ids, timestamps and timings. The proxied request must have had a
    plan.
    """

    def send_to_both(ask: Ask) -> tuple[Any, Any]:
        empty_slots(direct_port, 0)
        direct = without_volatile(ask(direct_port))
        empty_slots(direct_port, 0)
        proxied = without_volatile(ask(running.port))
        assert running.metric("evoke_tokens_total", kind="decoded") > 0
        assert running.metric("evoke_degraded_total") == 0
        return direct, proxied

    return send_to_both
