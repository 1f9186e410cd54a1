"""Prompts that differ only in meaningless text keep their cache after normalisation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import ask, proxy

STAMP = "x-anthropic-billing-header: cc_version=2.1; cch={};"
ALL = {"normalise__billing": True, "normalise__dates_h": 1.0, "normalise__tools": True}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def _body(path: str, stamp: str, clock: str, names: str, said: list[str]) -> dict[str, Any]:
    system = f"{STAMP.format(stamp)}\nYou help. Today is Monday, {clock}. " + "Be kind. " * 40
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    given: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    if path == CHAT:
        tool = lambda name: {"type": "function", "function": {"name": name, "parameters": {}}}  # noqa: E731
        return given | {
            "messages": [{"role": "system", "content": system}, *messages],
            "tools": [tool(name) for name in names],
        }
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in names]
    blocks = [{"type": "text", "text": system}]
    return given | {"system": blocks, "messages": messages, "tools": tools}


def _cached(port: int, path: str, body: dict[str, Any]) -> int:
    answer = ask(port, "POST", path, json.dumps(body).encode())
    assert answer.status == 200, answer.body
    reply = json.loads(answer.body)
    if path == CHAT:
        return int(reply["timings"]["cache_n"])
    return int(reply["usage"]["cache_read_input_tokens"])


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_normalised_prompts_keep_the_cache(path: str, stock_port: int) -> None:
    first = _body(path, "a5145", "12:34", "ab", ["Hello."])
    then = _body(path, "b0001", "13:57", "ba", ["Hello.", "Hi.", "And now?"])
    cached = {}
    for asked in (False, True):
        with proxy(stock_port, **(ALL if asked else {})) as running:
            for body in (first, then):
                cached[asked] = _cached(running.port, path, body)
            for what in ("billing", "dates", "tools"):
                times = running.metric("evoke_normalised_total", what=what)
                assert times == asked * (2 if what == "billing" else 1)
            untouched = then | {"evoke": False}
            _cached(running.port, path, untouched)
            assert running.metric("evoke_normalised_total", what="tools") == asked
    assert cached[False] < 60 < cached[True]
