"""Normalisation: prompts that differ only in meaningless text keep their cache."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import ask, proxy

BILLING = "x-anthropic-billing-header: cc_version=2.1; cch={};"
ALL = {"normalise__billing": True, "normalise__dates_h": 1.0, "normalise__tools": True}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def _body(path: str, stamp: str, clock: str, names: str, texts: list[str]) -> dict[str, Any]:
    """Return a body with a billing stamp, a clock time and tools in this order of names."""
    system = f"{BILLING.format(stamp)}\nYou help. Today is Monday, {clock}. " + "Be kind. " * 40
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    fields: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    if path == CHAT:
        functions = [{"name": name, "parameters": {}} for name in names]
        return fields | {
            "messages": [{"role": "system", "content": system}, *messages],
            "tools": [{"type": "function", "function": function} for function in functions],
        }
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in names]
    blocks = [{"type": "text", "text": system}]
    return fields | {"system": blocks, "messages": messages, "tools": tools}


def _n_cached(port: int, path: str, body: dict[str, Any]) -> int:
    """Send a request; returns how many tokens of its prompt were cached."""
    answer = ask(port, "POST", path, json.dumps(body).encode())
    assert answer.status == 200, answer.body
    reply = json.loads(answer.body)
    if path == CHAT:
        return int(reply["timings"]["cache_n"])
    return int(reply["usage"]["cache_read_input_tokens"])


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_normalised_prompts_keep_the_cache(path: str, stock_port: int) -> None:
    first = _body(path, "a5145", "12:34", "ab", ["Hello."])
    second = _body(path, "b0001", "13:57", "ba", ["Hello.", "Hi.", "And now?"])
    cached = {}
    for normalises in (False, True):
        with proxy(stock_port, **(ALL if normalises else {})) as running:
            for body in (first, second):
                cached[normalises] = _n_cached(running.port, path, body)
            for what in ("billing", "dates", "tools"):
                count = running.metric("evoke_normalised_total", what=what)
                assert count == normalises * (2 if what == "billing" else 1)
            unmanaged = second | {"evoke": False}
            _n_cached(running.port, path, unmanaged)
            assert running.metric("evoke_normalised_total", what="tools") == normalises
    assert cached[False] < 60 < cached[True]
