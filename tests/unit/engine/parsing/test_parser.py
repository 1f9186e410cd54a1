"""The request parser: which bodies are cached for the next request of a conversation."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config
from evoke_proxy.engine.parsing.parser import RequestParser
from evoke_proxy.engine.parsing.request import IncomingRequest, ParsedChat

LONG = "word " * 5000


def _parse(parser: RequestParser, messages: list[dict[str, Any]]) -> ParsedChat:
    body = orjson.dumps({"messages": messages})
    parsed = asyncio.run(parser.parse(IncomingRequest(dialect="chat", body=body, headers={})))
    assert isinstance(parsed, ParsedChat)
    return parsed


def test_only_plain_requests_are_cached() -> None:
    """Own fields of a request count again in the request that continues it."""
    parser = RequestParser(Config(), Metrics())
    marked = [{"role": "user", "content": LONG, "evoke_keep": "pin"}]
    plain = [{"role": "user", "content": "x" + LONG}]
    more = {"role": "user", "content": "And then?"}
    first = _parse(parser, marked)
    longer = _parse(parser, [*marked, more])
    assert (
        first.chat.keep_marks == longer.chat.keep_marks == {0: "pin"} and longer.cached_body is None
    )
    first = _parse(parser, plain)
    longer = _parse(parser, [*plain, more])
    assert first.cached_body is not None
    assert [it.text for it in longer.chat.messages] == ["x" + LONG, "And then?"]
