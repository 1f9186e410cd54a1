"""What is remembered of a request for the next of its conversation."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.engine.parsing.parser import RequestParser
from evoke_proxy.engine.turns.forwarding import Forwarding

LONG = "word " * 5000


def _read(reader: RequestParser, messages: list[dict[str, Any]]) -> tuple[ChatRequest, Forwarding]:
    way = Forwarding(orjson.dumps({"messages": messages}), 0.0)
    request = asyncio.run(reader.read(way, "chat", {}))
    assert isinstance(request, ChatRequest)
    return request, way


def test_only_of_plain_requests_anything_is_remembered() -> None:
    """Of what goes on from one with marks of ours, the marks count again."""
    reader = RequestParser(Config(), Metrics())
    marked = [{"role": "user", "content": LONG, "evoke_keep": "pin"}]
    plain = [{"role": "user", "content": "x" + LONG}]
    more = {"role": "user", "content": "And then?"}
    first, way = _read(reader, marked)
    again, _ = _read(reader, [*marked, more])
    assert first.keeps == again.keeps == {0: "pin"} and way.kept is None
    _, way = _read(reader, plain)
    goes_on, _ = _read(reader, [*plain, more])
    assert way.kept is not None and [it.text for it in goes_on.messages] == [
        "x" + LONG,
        "And then?",
    ]
