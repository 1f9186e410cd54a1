"""Large chats to unpatched servers are read in threads, not on the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.engine.server.conversations import Asked
from evoke_proxy.engine.strategies.snapshots.strategy import SnapshotStrategy
from evoke_proxy.engine.strategies.snapshots.turn import SnapshotTurn
from evoke_proxy.engine.turns.forwarding import Forwarding

# What the loop may be busy with one body, in processor time of its thread.
MOST_S = 0.02
TOKENS = np.arange(200, dtype=np.int32)
ONE = {"role": "user", "content": "word, and " * 800}


class _Calls(StockApi):
    """Answers at once, with the same tokens for every text."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.n_ctx = None

    async def text(self, body: bytes, client: Any) -> str:
        self.bodies.append(body)
        return "text" * len(self.bodies)

    async def tokens(self, text: str, special: bool, client: Any) -> Any:
        return TOKENS

    async def count(self, path: str, body: bytes, client: Any) -> int:
        return len(TOKENS)


def _keeper(calls: _Calls, before: Asked | None) -> SnapshotStrategy:
    keeper = SnapshotStrategy.__new__(SnapshotStrategy)
    keeper._calls = calls
    keeper._facts = SimpleNamespace(stability=lambda tools: SimpleNamespace(boundary=True))
    keeper._conversations = SimpleNamespace(asked_before=lambda known, asked: before)
    drifts = SimpleNamespace(labels=lambda cause: SimpleNamespace(inc=lambda: None))
    keeper._metrics = SimpleNamespace(drifts=drifts)
    return keeper


def _body(n: int, first: str) -> bytes:
    return json.dumps({"messages": [ONE | {"content": first}, *[ONE] * n]}).encode()


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_the_loop_does_not_read_a_large_chat(dialect: str) -> None:
    body = _body(2000, "Hello.")
    request = parse_chat(dialect, orjson.loads(body), False)

    async def run() -> float:
        calls = _Calls()
        keeper = _keeper(calls, None)
        way = Forwarding(body, 0.0)
        began = time.thread_time()
        seat = await keeper._render(way, request, None, "")
        took = time.thread_time() - began
        assert seat is not None
        assert len(orjson.loads(seat.body)["messages"]) == 2001
        assert [orjson.loads(asked).get("add_generation_prompt") for asked in calls.bodies] == [
            None,
            False,
        ]
        return took

    assert min(asyncio.run(run()) for _ in range(3)) < MOST_S


def test_the_loop_does_not_compare_large_chats() -> None:
    body, earlier = _body(2000, "Hello."), _body(2000, "Good morning.")
    request = parse_chat("chat", orjson.loads(body), False)

    async def run() -> float:
        keeper = _keeper(_Calls(), Asked(earlier, TOKENS[1:], b""))
        known: Any = SimpleNamespace(asked=None, drift=None, id="1")
        began = time.thread_time()
        await keeper._note_drift(known, SnapshotTurn(request, "", body, TOKENS, TOKENS))
        took = time.thread_time() - began
        assert known.drift["cause"] == "edited_history" and known.drift["message"] == 0
        assert known.asked.opening == b'{"content": "Hello.", "role": "user"}'
        return took

    assert min(asyncio.run(run()) for _ in range(3)) < MOST_S
