"""The request parser: which bodies are cached for the next request of a conversation."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config, SecurityConfig
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


@pytest.mark.parametrize("dialect", ["chat", "completions"])
@pytest.mark.parametrize("keys_file", ["", "keys"])
def test_no_client_with_a_key_has_rows_moved_to_other_positions(
    dialect: str, keys_file: str
) -> None:
    """An unpatched llama-server would keep rows of one tenant for the prompts of all others."""
    parser = RequestParser(Config(security=SecurityConfig(keys_file=keys_file)), Metrics())
    body = b'{"n_cache_reuse": 1, "prompt": "a", "n_cache_\\u0072euse":2, "messages": []}'
    incoming = IncomingRequest(dialect=dialect, body=body, headers={})
    parsed = asyncio.run(parser.parse(incoming))
    expected = b'{"prompt": "a", "messages": []}' if keys_file else body
    assert parsed.body.replace(b" ", b"") == expected.replace(b" ", b"")
