"""The error for a prompt longer than the context advises how to allow it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from harness import TIMEOUT_S, Answer, ask, llama_server, proxy, server_binary, until

LONG = "Grass is green and the sky is blue. " * 200
TURN = [{"role": "user", "content": LONG}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURN},
    "/v1/messages": {"messages": TURN, "max_tokens": 8},
    "/v1/responses": {"input": LONG},
    "/v1/completions": {"prompt": LONG},
    "/completion": {"prompt": LONG},
}
UPSTREAM_MESSAGE = "exceeds the available context size (512 tokens)"


def post(port: int, path: str, **fields: Any) -> Answer:
    return ask(port, "POST", path, json.dumps(BODIES[path] | fields).encode())


@contextmanager
def small_server(patched: bool) -> Iterator[int]:
    options = ["-np", "1", "-c", "512", *(["--evoke-ram", "16"] if patched else [])]
    with llama_server(server_binary(patched=patched), *options) as port:
        yield port


@pytest.fixture(scope="module")
def patched_small_port() -> Iterator[int]:
    with small_server(patched=True) as port:
        yield port


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_the_error_is_that_of_llama_server_with_advice(
    path: str, streams: bool, patched_small_port: int
) -> None:
    with proxy(patched_small_port) as running:
        direct = post(patched_small_port, path, stream=streams)
        answer = post(running.port, path, stream=streams)
    assert direct.status == answer.status == 400
    original, advised = json.loads(direct.body), json.loads(answer.body)
    assert UPSTREAM_MESSAGE in advised["error"]["message"]
    assert "--ctx-logical" in advised["error"]["message"]
    assert "--ctx-logical" not in original["error"]["message"]
    assert advised["error"]["message"].startswith(original["error"]["message"])
    original["error"].pop("message"), advised["error"].pop("message")
    assert advised == original
    assert answer.headers["content-length"] == str(len(answer.body))


def test_a_stream_that_has_begun_ends_with_the_same_advice(patched_small_port: int) -> None:
    """The only slot is in use, so the stream begins before the prompt is refused."""
    with proxy(patched_small_port, limits__keepalive_s=0.05) as running:
        slots = running.gateway.server.slots
        acquiring = asyncio.run_coroutine_threadsafe(slots.acquire("other", ""), running.loop)
        lease = acquiring.result(TIMEOUT_S)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(post, running.port, "/v1/chat/completions", stream=True)
            until(lambda: slots.pool.queued)
            time.sleep(0.2)
            running.loop.call_soon_threadsafe(lease.__exit__)
            answer = waiting.result()
    assert answer.status == 200
    (event,) = re.findall(rb"data: (.*)\n", answer.body)
    assert "--ctx-logical" in json.loads(event)["error"]["message"]


def test_at_the_trained_length_no_longer_context_is_advised() -> None:
    with llama_server(server_binary(patched=True), "-np", "1", "--evoke-ram", "16") as port:
        with proxy(port) as running:
            turn = [{"role": "user", "content": LONG * 6}]
            answer = post(running.port, "/v1/chat/completions", messages=turn)
    message = json.loads(answer.body)["error"]["message"]
    assert answer.status == 400 and "(8192 tokens)" in message
    assert "--ctx-logical" not in message and "shorten the chat" in message


def test_other_errors_and_those_of_a_stock_server_are_unchanged(
    patched_small_port: int,
) -> None:
    with proxy(patched_small_port) as running:
        invalid = b'{"messages": [{"role": "user", "content": "x"}], "n_probs": "many"}'
        bodies = [
            ask(port, "POST", "/v1/chat/completions", invalid).body
            for port in (patched_small_port, running.port)
        ]
        assert bodies[0] == bodies[1] and b"error" in bodies[0]
    with small_server(patched=False) as port, proxy(port) as running:
        for path in BODIES:
            assert post(running.port, path).body == post(port, path).body
