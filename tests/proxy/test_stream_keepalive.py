"""A stream that waits for its slot gets comments; later errors are events of it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from conversation import FILLER, EndlessStream, endless_stream, events
from harness import Answer, RunningProxy, ask, proxy, until

JSON = {"Content-Type": "application/json"}
WAITING = b": waiting\n\n"
USER = [{"role": "user", "content": "Hello there."}]
CHAT: dict[str, Any] = {"messages": USER, "max_tokens": 8, "temperature": 0, "stream": True}


@dataclass(frozen=True, slots=True)
class Busy:
    """A proxy whose only slot is generating for somebody."""

    running: RunningProxy
    somebody: EndlessStream

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Answer:
        """An answer, whatever it waits for."""
        named = JSON | {name.replace("_", "-"): value for name, value in headers.items()}
        return ask(self.running.port, "POST", path, json.dumps(body).encode(), named)

    def waited(self, path: str, body: dict[str, Any], **headers: str) -> Answer:
        """The answer to a request whose slot becomes free when it has waited for a few comments."""
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.post, path, body, **headers)
            until(self.queued)
            time.sleep(0.2)
            self.somebody.disconnect()
            return asked.result()

    def queued(self) -> int:
        """How many wait for the slot."""
        return self.running.gateway.server.slots.pool.queued


@contextmanager
def _busy(port: int, **overrides: object) -> Iterator[Busy]:
    with (
        proxy(port, limits__keepalive_s=0.05, **overrides) as running,
        endless_stream(running.port) as somebody,
    ):
        yield Busy(running, somebody)


def _after(answer: Answer) -> bytes:
    """What follows the comments, of which there must be some."""
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.body.startswith(WAITING)
    return answer.body.replace(WAITING, b"")


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/chat/completions", CHAT, b"data: [DONE]\n\n"),
        ("/v1/messages", CHAT, b'data: {"type":"message_stop"}\n\n'),
        ("/v1/responses", CHAT | {"input": "Hello there."}, b"\n\n"),
        ("/v1/completions", CHAT | {"prompt": "Hello there."}, b"data: [DONE]\n\n"),
    ],
)
def test_comments_come_before_the_same_stream(
    patched_port: int, path: str, body: dict[str, Any], end: bytes
) -> None:
    with _busy(patched_port) as busy:
        rest = _after(busy.waited(path, body, Origin="http://a.example"))
        assert rest.endswith(end)
        assert b'"error"' not in rest
        answer = busy.post(path, body)
        assert WAITING not in answer.body
        kinds = [sorted(event) for event in events(answer.body)]
        assert [sorted(event) for event in events(rest)] == kinds


def test_a_complete_answer_has_no_comments(patched_port: int) -> None:
    with _busy(patched_port) as busy:
        answer = busy.waited("/v1/chat/completions", CHAT | {"stream": False})
    assert json.loads(answer.body)["choices"]


@pytest.mark.parametrize(
    ("path", "begins"),
    [
        ("/v1/chat/completions", b'data: {"error":{'),
        ("/v1/responses", b'data: {"error":{'),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{'),
    ],
)
def test_a_queue_timeout_is_an_event(patched_port: int, path: str, begins: bytes) -> None:
    with _busy(patched_port, limits__queue_timeout_s=0.8) as busy:
        answer = busy.post(path, CHAT | {"input": "Hello."})
        assert _after(answer).startswith(begins)
        (event,) = events(answer.body)
        assert "no slot became free" in event["error"]["message"]
        # Nobody has begun anything for a client that is not waiting for a stream.
        refused = busy.post(path, CHAT | {"input": "Hello.", "stream": False})
        assert (refused.status, "retry-after" in refused.headers) == (503, True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "user", "content": FILLER * 9, "evoke_keep": "pin"}]}, "pinned"),
        ({"grammar": "root ::= ("}, "grammar"),
    ],
)
def test_a_refusal_after_waiting_is_an_event(
    patched_port: int, fields: dict[str, Any], message: str
) -> None:
    with _busy(patched_port, policy__budget=320) as busy:
        answer = busy.waited("/v1/chat/completions", CHAT | fields)
        (event,) = events(_after(answer))
        assert message in event["error"]["message"]
        assert busy.post("/v1/chat/completions", CHAT).status == 200


def test_a_client_that_leaves_the_queue_is_removed_from_it(patched_port: int) -> None:
    with _busy(patched_port) as busy:
        running = busy.running
        connection = http.client.HTTPConnection("127.0.0.1", running.port)
        connection.request("POST", "/v1/chat/completions", json.dumps(CHAT), JSON)
        answer = connection.getresponse()
        assert answer.read1(5) and busy.queued() == 1
        answer.close()
        connection.close()
        until(lambda: not busy.queued())
        assert _after(busy.waited("/v1/chat/completions", CHAT)).endswith(b"[DONE]\n\n")
        named = {"endpoint": "/v1/chat/completions", "code": "499"}
        assert running.metric("evoke_requests_total", **named) == 2  # it, and who had the slot
        assert running.metric("evoke_upstream_errors_total", kind="upstream_unavailable") == 0
