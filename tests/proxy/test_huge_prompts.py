"""A prompt far longer than the context of a server does not block the event loop.

Fresh memory can take processor time of the host, see test_event_loop_stall.py. A callback above the
limit is therefore measured again: one that is slow by its code is slow each time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import ask, llama_server, proxy, server_binary

# Limit of the loop's longest callback, in processor time.
_LIMIT_S = 0.04
_MAX_MEASUREMENTS = 3
_WORDS = 8_000_000
# Requests are planned only with it.
_PLANNED = ("--evoke-ram", "64")
# Texts of 7 MiB that are searched for what a client has added, and for what the user says.
_RESULT = "[read_file for 'a.py'] Result:\n{}\n<environment_details>\nx\n</environment_details>"
_OF_AGENTS = {
    "result": [_RESULT.format(":" * (7 << 20))],
    "result with tags": [_RESULT.format("<task>\n" * (1 << 20))],
    "many results": [_RESULT.format("hello: you\n" * 160)] * 4000,
    "addition": [f"<system-reminder>{'x</' * (7 << 19)}>"],
}


@contextmanager
def longest_callback(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Yield a list whose item is the longest callback of all event loops, in processor seconds."""
    longest, run = [0.0], asyncio.Handle._run

    def timed(handle: Any) -> None:
        began = time.thread_time()
        try:
            run(handle)
        finally:
            longest[0] = max(longest[0], time.thread_time() - began)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", timed)
        yield longest


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "stock"])
def test_a_prompt_of_millions_of_tokens_is_refused_without_blocking_the_event_loop(
    patched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chat(port: int, text: str) -> Any:
        body = {"max_tokens": 2, "messages": [{"role": "user", "content": text}]}
        return ask(port, "POST", "/v1/chat/completions", json.dumps(body).encode())

    options = ("-np", "1", "--slot-save-path", str(tmp_path), *(_PLANNED if patched else ()))
    with (
        llama_server(server_binary(patched=patched), *options) as port,
        proxy(port, policy__budget=2048, snapshots__directory=str(tmp_path)) as running,
    ):
        assert chat(running.port, "Hello.").status == 200
        measured = list[float]()
        while not measured or (measured[-1] >= _LIMIT_S and len(measured) < _MAX_MEASUREMENTS):
            with longest_callback(monkeypatch) as longest:
                answer = chat(running.port, "7 " * _WORDS)
            assert answer.status == 400
            assert json.loads(answer.body)["error"]["type"] == "exceed_context_size_error"
            measured += longest
        assert min(measured) < _LIMIT_S, measured
        assert running.metric("evoke_degraded_total") == 0
        assert chat(running.port, "Hello again.").status == 200


@pytest.mark.parametrize("name", _OF_AGENTS)
def test_long_messages_of_a_coding_agent_do_not_block_the_event_loop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [{"role": "assistant", "content": "Hello."}]
    said += [{"role": "user", "content": text} for text in _OF_AGENTS[name]]
    body = json.dumps({"max_tokens": 2, "messages": said}).encode()
    options = ("-np", "1", "--slot-save-path", str(tmp_path), *_PLANNED)
    with (
        llama_server(server_binary(patched=True), *options) as port,
        proxy(port, policy__budget=2048, snapshots__directory=str(tmp_path)) as running,
    ):
        measured = list[float]()
        while not measured or (measured[-1] >= _LIMIT_S and len(measured) < _MAX_MEASUREMENTS):
            with longest_callback(monkeypatch) as longest:
                answer = ask(running.port, "POST", "/v1/chat/completions", body)
            assert answer.status == 400, answer.body[:300]
            measured += longest
        assert min(measured) < _LIMIT_S, measured


def _calls(n: int) -> list[dict[str, Any]]:
    """Calls whose arguments a template without tools leaves out."""
    function = {"name": "f", "arguments": json.dumps({"path": "a", "x": [0] * 8000})}
    return [{"id": str(i), "type": "function", "function": function} for i in range(n)]


# Conversations with a short prompt, of many messages or of a large body.
_SHORT_PROMPTS = {
    "tiny messages": [{"role": role, "content": "a"} for role in ["user", "assistant"] * 600],
    "arguments": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": _calls(1000)},
        {"role": "tool", "tool_call_id": "0", "content": "c"},
    ],
}


@pytest.mark.parametrize("name", _SHORT_PROMPTS)
def test_a_new_conversation_is_divided_into_blocks_outside_the_event_loop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("-np", "1", "-c", "16384", "--slot-save-path", str(tmp_path), *_PLANNED)
    with (
        llama_server(server_binary(patched=True), *options) as port,
        proxy(port, policy__budget=2048, snapshots__directory=str(tmp_path)) as running,
    ):
        measured = list[float]()
        while not measured or (measured[-1] >= _LIMIT_S and len(measured) < _MAX_MEASUREMENTS):
            system = {"role": "system", "content": f"{len(measured)}"}
            messages = [system, *_SHORT_PROMPTS[name], {"role": "user", "content": "d"}]
            body = json.dumps({"max_tokens": 2, "messages": messages}).encode()
            with longest_callback(monkeypatch) as longest:
                answer = ask(running.port, "POST", "/v1/chat/completions", body)
            assert answer.status == 200, answer.body[:300]
            measured += longest
        assert min(measured) < _LIMIT_S, measured
        assert running.metric("evoke_degraded_total") == 0
