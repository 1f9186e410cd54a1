"""The demo's client and its processes, with small local servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from bench.listening import Quiet, listening
from evoke_proxy.demo.client import DemoError, chat, content, events
from evoke_proxy.demo.processes import (
    free_port,
)
from evoke_proxy.models import bundled_model

STREAM = (
    b": keep-alive\n\n"
    b'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"Your PIN "}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"is 1."}}]}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"timings":{"prompt_n":7}}\n\n'
    b"data: [DONE]\n\n"
)


class FakeServer(Quiet):
    status, answer = 200, STREAM
    bodies: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.body()))
        self.send_response(self.status)
        self.send_header("X-Evoke-Evicted", "blocks=3;tokens=180")
        self.end_headers()
        self.wfile.write(self.answer)


@pytest.fixture
def upstream() -> Iterator[tuple[int, type[FakeServer]]]:
    handler = type("Fresh", (FakeServer,), {"bodies": []})
    with listening(handler) as port:
        yield port, handler


def test_chat_joins_a_streamed_answer(upstream: tuple[int, type[FakeServer]]) -> None:
    port, handler = upstream
    reply = chat(port, {"messages": []}, {"X-Evoke-Session": "a"})
    assert reply.text == "Your PIN is 1." and reply.timings == {"prompt_n": 7}
    assert reply.headers["x-evoke-evicted"] == "blocks=3;tokens=180"
    assert reply.ttft_ms > 0
    assert handler.bodies == [{"messages": [], "stream": True}]


def test_the_error_of_a_refused_chat_quotes_the_server(
    upstream: tuple[int, type[FakeServer]],
) -> None:
    port, handler = upstream
    handler.status, handler.answer = 503, b'{"error":"no free cells"}'
    with pytest.raises(DemoError, match="503.*no free cells"):
        chat(port, {}, {})


def test_an_error_in_the_stream_raises_demo_error(upstream: tuple[int, type[FakeServer]]) -> None:
    port, handler = upstream
    handler.answer = b'data: {"error":{"message":"out of memory"}}\n\n'
    with pytest.raises(DemoError, match="broke off.*out of memory"):
        chat(port, {}, {})


def test_a_refused_connection_raises_demo_error() -> None:
    with pytest.raises(DemoError, match="failed"):
        chat(free_port(), {}, {})


def test_events_skip_comments_and_the_done_marker() -> None:
    assert len(list(events(iter(STREAM.splitlines(keepends=True))))) == 4
    assert len(list(events(iter(STREAM.splitlines())))) == 4
    # The last event counts without the blank line after it.
    assert list(events(iter([b": comment", b"", b'data: {"a":', b"data: 1}"]))) == [{"a": 1}]
    assert content({"choices": []}) == "" == content({"usage": {}})


def test_the_bundled_model_is_a_gguf_file() -> None:
    assert bundled_model().read_bytes()[:4] == b"GGUF"
