"""A patched server without options of the patches behaves like the stock server."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from llama import Llama, sample_text

CHAT = {
    "messages": [
        {"role": "system", "content": "You are a small assistant. Be brief."},
        {"role": "user", "content": "My lucky number is 7316."},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": "What is my lucky number?"},
    ],
    "temperature": 0,
    "max_tokens": 20,
}
REQUESTS: list[tuple[str, str, Any]] = [
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", CHAT | {"stream": True}),
    ("POST", "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 5}),
    ("POST", "/v1/chat/completions", CHAT | {"n": 2}),
    ("POST", "/v1/chat/completions", CHAT | {"evoke": {"epoch": 1}, "id_slot": 0}),
    ("POST", "/v1/chat/completions", {"messages": "no"}),
    ("POST", "/v1/messages", CHAT | {"messages": CHAT["messages"][1:]}),
    ("POST", "/v1/responses", {"input": "Hello!", "temperature": 0, "max_output_tokens": 8}),
    ("POST", "/v1/completions", {"prompt": "The old river", "temperature": 0, "max_tokens": 12}),
    ("POST", "/completion", {"prompt": sample_text(300), "n_predict": 12, "temperature": 0}),
    (
        "POST",
        "/completion",
        {"prompt": sample_text(300), "n_predict": 9, "temperature": 0, "n_probs": 9},
    ),
    ("POST", "/tokenize", {"content": "The river follows the machine."}),
    ("POST", "/apply-template", CHAT),
    ("POST", "/v1/embeddings", {"input": "x"}),
    ("POST", "/slots/0?action=save", {"filename": "slot.bin"}),
    ("POST", "/slots/0?action=restore", {"filename": "slot.bin"}),
    ("POST", "/slots/0?action=restore", {"filename": "missing.bin"}),
    ("POST", "/slots/0?action=erase", {}),
    ("POST", "/slots/0?action=dance", {}),
    ("GET", "/nowhere", None),
    ("GET", "/props", None),
    ("GET", "/v1/models", None),
]
# what differs between any two runs of one server: ids, times, the build
VARYING = re.compile(
    r'"(id|item_id|created|created_at|completed_at|build_info|system_fingerprint|media_marker)":'
    r'("[^"]*"|[0-9]+)|"(timings|response_fields)":\{[^{}]*\}|"(save|restore)_ms":[0-9.]+'
    r"|(msg|resp|rs|chatcmpl|fc)[-_][A-Za-z0-9]+"
)


def without_varying(raw: bytes) -> str:
    return VARYING.sub("~", raw.decode())


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_requests_get_the_answers_of_the_stock_server(
    stock: Llama, plain: Llama, method: str, path: str, body: Any
) -> None:
    raw = None if body is None else json.dumps(body).encode()
    expected = stock.raw(method, path, raw)
    answered = plain.raw(method, path, raw)
    assert answered[0] == expected[0]
    assert without_varying(answered[1]) == without_varying(expected[1])


def test_the_help_names_the_option_evoke_ram(plain: Llama) -> None:
    import subprocess

    from llama import binary

    text = subprocess.run([binary(True), "--help"], capture_output=True, text=True).stdout
    assert "--evoke-ram" in text
