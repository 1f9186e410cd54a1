"""Fixtures of the proxy tests: one stock llama-server, and a proxy in front of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from running import RunningProxy, llama_server, proxy, server_binary

from evoke_proxy.web.dialects import ANSWER_PATHS

Json = dict[str, Any]


@pytest.fixture(scope="session")
def stock_port() -> Iterator[int]:
    """The port of a stock llama-server with metrics and slots."""
    with llama_server(server_binary(patched=False), "-np", "1", "--metrics") as port:
        yield port


@pytest.fixture(scope="session")
def stock_proxy(stock_port: int) -> Iterator[RunningProxy]:
    """A proxy with default settings in front of the stock server."""
    with proxy(stock_port) as running:
        yield running


@pytest.fixture(scope="session")
def patched_port() -> Iterator[int]:
    """The port of a patched llama-server with one slot."""
    binary = server_binary(patched=True)
    with llama_server(binary, "-np", "1", "--evoke-ram", "64", "--metrics") as port:
        yield port


@pytest.fixture
def patched_proxy(patched_port: int) -> Iterator[RunningProxy]:
    """A proxy of its own in front of the patched server."""
    with proxy(patched_port) as running:
        yield running


@pytest.fixture(scope="session")
def two_slots_port() -> Iterator[int]:
    """The port of a patched llama-server with two slots, each with cells of its own."""
    binary = server_binary(patched=True)
    with llama_server(binary, "-np", "2", "-no-kvu", "--evoke-ram", "64") as port:
        yield port


@pytest.fixture
def noting(patched_port: int) -> Iterator[tuple[RunningProxy, list[Json]]]:
    """A proxy of its own, and the bodies it forwards to a chat of any dialect."""
    sent: list[Json] = []
    with proxy(patched_port) as running:
        upstream = running.engine.upstream
        opened = upstream.open

        def noted(method: str, target: str, headers: Any, body: Any = None) -> Any:
            if target in ANSWER_PATHS and isinstance(body, bytes):
                sent.append(json.loads(body))
            return opened(method, target, headers, body)

        upstream.open = noted  # type: ignore[method-assign]
        yield running, sent
