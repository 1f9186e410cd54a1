"""Snapshot strategy: large chats are parsed and compared in threads, not on the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest

from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import LimitsConfig
from evoke_proxy.core.request.chat import parse_chat
from evoke_proxy.core.snapshots.slot_contents import SentRequest
from evoke_proxy.engine.gateway import ForwardedBody, RequestTrace
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedChat
from evoke_proxy.engine.server.conversation_states import SnapshotState
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.server.turn import TurnScope
from evoke_proxy.engine.strategies.snapshots.slot_placement import SnapshotTurn
from evoke_proxy.engine.strategies.snapshots.strategy import SnapshotStrategy

# The processor time of the event loop's thread that one body may take, in seconds.
MOST_S = 0.02
TOKENS = np.arange(200, dtype=np.int32)
ONE = {"role": "user", "content": "word, and " * 800}


class _Calls(StockApi):
    """Answers at once, with the same tokens for every text."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        super().__init__(cast(Any, None))

    async def apply_template(self, body: bytes) -> str:
        self.bodies.append(body)
        return "text" * len(self.bodies)

    async def tokenize(self, text: str, special: bool) -> Any:
        return TOKENS

    async def count_tokens(self, path: str, body: bytes) -> int:
        return len(TOKENS)


def _strategy(api: _Calls, *conversations: Any) -> SnapshotStrategy:
    strategy = SnapshotStrategy.__new__(SnapshotStrategy)
    strategy._api = api
    strategy.probe = SimpleNamespace(stability=lambda tools: SimpleNamespace(boundary=True))
    strategy._conversations = conversations
    drifts = SimpleNamespace(labels=lambda cause: SimpleNamespace(inc=lambda: None))
    strategy._metrics = SimpleNamespace(drifts=drifts)
    return strategy


def _request(dialect: str, body: bytes) -> ParsedChat:
    chat = parse_chat(dialect, orjson.loads(body))
    incoming = IncomingRequest(
        dialect=dialect, target="", body=body, headers={}, forwarded_headers={}
    )
    return ParsedChat(incoming=incoming, tenant="", body=body, chat=chat)


def _scope(request: ParsedChat, api: _Calls) -> TurnScope:
    calls: Any = SimpleNamespace(stock=api)
    return TurnScope(request, RequestTrace(0.0), SlotQueue(LimitsConfig()), Metrics(), calls)


def _body(n: int, first: str) -> bytes:
    return json.dumps({"messages": [ONE | {"content": first}, *[ONE] * n]}).encode()


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_large_chats_are_parsed_off_the_event_loop(dialect: str) -> None:
    body = _body(2000, "Hello.")
    request = _request(dialect, body)

    async def run() -> float:
        calls = _Calls()
        strategy = _strategy(calls)
        start = time.thread_time()
        turn = await strategy._render(request, _scope(request, calls))
        seconds = time.thread_time() - start
        assert turn is not None
        assert len(orjson.loads(turn.body)["messages"]) == 2001
        assert [orjson.loads(body).get("add_generation_prompt") for body in calls.bodies] == [
            None,
            False,
        ]
        return seconds

    assert min(asyncio.run(run()) for _ in range(3)) < MOST_S


def test_large_chats_are_compared_off_the_event_loop() -> None:
    body, earlier = _body(2000, "Hello."), _body(2000, "Good morning.")
    request = _request("chat", body)
    turn = SnapshotTurn(
        request=request,
        calls=cast(Any, None),
        forwarded=ForwardedBody(body),
        chat=request.chat,
        body=body,
        prompt=TOKENS,
        boundary=TOKENS,
    )

    async def run() -> float:
        before = SnapshotState(sent=SentRequest(earlier, TOKENS[1:], b""))
        strategy = _strategy(_Calls())
        conversation: Any = SimpleNamespace(snapshots=before, id="1")
        start = time.thread_time()
        await strategy._note_drift(conversation, turn)
        seconds = time.thread_time() - start
        drift = conversation.snapshots.drift
        assert drift["cause"] == "edited_history" and drift["message"] == 0
        assert conversation.snapshots.sent.opening == b'{"content": "Hello.", "role": "user"}'
        return seconds

    assert min(asyncio.run(run()) for _ in range(3)) < MOST_S
