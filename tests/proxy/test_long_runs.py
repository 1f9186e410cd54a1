"""Texts without a break end no llama-server whose vocabulary is split by std::regex."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import RunningProxy, ask, llama_server, process_on, proxy, server_binary

from evoke_proxy.adapters.secret_files import write_secret
from evoke_proxy.core.tenants.api_keys import Caller, key_of, line_of

KEY = key_of(b"runs".ljust(32, b"."))
WORD = "a" * 30_000
LINES = json.dumps({"text": "\n" * 30_000})
CALL = {"id": "1", "type": "function", "function": {"name": "run", "arguments": LINES}}
PARTS = [{"type": "text", "text": "a" * 10_000}] * 3
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORD}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PARTS}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": WORD}]}),
    ("/v1/responses", {"input": WORD}),
    ("/v1/completions", {"prompt": "-" * 30_000}),
    ("/infill", {"input_prefix": WORD, "input_suffix": ""}),
    ("/tokenize", {"content": " " * 30_000}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": WORD}]}),
    ("/apply-template", {"messages": [{"role": "assistant", "content": "", "tool_calls": [CALL]}]}),
]


@pytest.fixture(scope="module", params=("stock", "patched"))
def upstream(request: pytest.FixtureRequest) -> Iterator[int]:
    options = ("-np", "2", "--override-kv", "tokenizer.ggml.pre=str:gpt-4o")
    with llama_server(server_binary(patched=request.param == "patched"), *options) as port:
        yield port


@pytest.fixture(scope="module")
def running(upstream: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys"
    write_secret(path, line_of(Caller("a", "a"), KEY))
    with proxy(upstream, security__keys_file=str(path)) as guarding_proxy:
        yield guarding_proxy


def test_a_text_without_a_break_ends_no_server(running: RunningProxy, upstream: int) -> None:
    process = process_on(upstream)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    is_patched = running.gateway.served_models[0].server.info.patched
    for path, body in BODIES:
        sent = json.dumps(body | {"max_tokens": 1}).encode()
        answer = ask(running.port, "POST", path, sent, headers)
        error = json.loads(answer.body).get("error", {})
        refused = "limits.run_chars" in error.get("message", "")
        # The patched server reads it, and may say that the prompt is longer than its context.
        assert refused is not is_patched, (path, answer.status, answer.body[:300])
    assert process_on(upstream) == process, "llama-server was restarted"
    assert ask(upstream, "GET", "/health").status == 200
