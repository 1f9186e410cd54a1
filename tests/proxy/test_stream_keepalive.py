"""A stream that waits for its slot gets keep-alive comments; later errors are events in it."""

from __future__ import annotations

import http.client
import json
import re
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
_COMMENT = re.compile(rb"^: [^\n]*\n\n", re.MULTILINE)
USER = [{"role": "user", "content": "Hello there."}]
CHAT: dict[str, Any] = {"messages": USER, "max_tokens": 8, "temperature": 0, "stream": True}


@dataclass(frozen=True, slots=True)
class BusyProxy:
    """A proxy whose only slot is busy.

    Attributes:
        stream: The endless stream that keeps the slot busy.
    """

    running: RunningProxy
    stream: EndlessStream

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Answer:
        """Send a request; returns its answer."""
        sent = JSON | {name.replace("_", "-"): value for name, value in headers.items()}
        return ask(self.running.port, "POST", path, json.dumps(body).encode(), sent)

    def post_and_free_slot(self, path: str, body: dict[str, Any], **headers: str) -> Answer:
        """Send a request, and free the slot after a few keep-alive comments; returns the answer."""
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self.post, path, body, **headers)
            until(self.queued)
            time.sleep(0.2)
            self.stream.disconnect()
            return waiting.result()

    def queued(self) -> int:
        """Return the number of requests that wait for the slot."""
        return self.running.gateway.server.slots.pool.queued


@contextmanager
def _busy_proxy(port: int, **overrides: object) -> Iterator[BusyProxy]:
    with (
        proxy(port, limits__keepalive_s=0.05, **overrides) as running,
        endless_stream(running.port) as stream,
    ):
        yield BusyProxy(running, stream)


def _without_comments(answer: Answer) -> bytes:
    """Return the body of a stream without its keep-alive comments, of which it must have some."""
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.body.startswith(WAITING)
    return _COMMENT.sub(b"", answer.body)


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/chat/completions", CHAT, b"data: [DONE]\n\n"),
        ("/v1/messages", CHAT, b'data: {"type":"message_stop"}\n\n'),
        ("/v1/responses", CHAT | {"input": "Hello there."}, b"\n\n"),
        ("/v1/completions", CHAT | {"prompt": "Hello there."}, b"data: [DONE]\n\n"),
    ],
)
def test_comments_precede_an_otherwise_unchanged_stream(
    patched_port: int, path: str, body: dict[str, Any], end: bytes
) -> None:
    with _busy_proxy(patched_port) as busy:
        rest = _without_comments(busy.post_and_free_slot(path, body, Origin="http://a.example"))
        assert rest.endswith(end)
        assert b'"error"' not in rest
        answer = busy.post(path, body)
        kinds = [sorted(event) for event in events(answer.body)]
        assert [sorted(event) for event in events(rest)] == kinds


def test_an_answer_that_is_not_streamed_has_no_comments(patched_port: int) -> None:
    with _busy_proxy(patched_port) as busy:
        answer = busy.post_and_free_slot("/v1/chat/completions", CHAT | {"stream": False})
    assert json.loads(answer.body)["choices"]


@pytest.mark.parametrize(
    ("path", "begins"),
    [
        ("/v1/chat/completions", b'data: {"error":{'),
        ("/v1/responses", b'data: {"error":{'),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{'),
    ],
)
def test_a_queue_timeout_is_an_error_event_of_the_stream(
    patched_port: int, path: str, begins: bytes
) -> None:
    with _busy_proxy(patched_port, limits__queue_timeout_s=0.8) as busy:
        answer = busy.post(path, CHAT | {"input": "Hello."})
        assert _without_comments(answer).startswith(begins)
        (event,) = events(answer.body)
        assert "no slot became free" in event["error"]["message"]
        # An answer that is not streamed has not begun, so it gets an error status.
        refused = busy.post(path, CHAT | {"input": "Hello.", "stream": False})
        assert (refused.status, "retry-after" in refused.headers) == (503, True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "user", "content": FILLER * 9, "evoke_keep": "pin"}]}, "pinned"),
        ({"grammar": "root ::= ("}, "grammar"),
    ],
)
def test_a_refusal_after_waiting_is_an_error_event_of_the_stream(
    patched_port: int, fields: dict[str, Any], message: str
) -> None:
    with _busy_proxy(patched_port, policy__budget=320) as busy:
        answer = busy.post_and_free_slot("/v1/chat/completions", CHAT | fields)
        (event,) = events(_without_comments(answer))
        assert message in event["error"]["message"]
        assert busy.post("/v1/chat/completions", CHAT).status == 200


def test_a_client_that_disconnects_while_waiting_leaves_the_queue(patched_port: int) -> None:
    with _busy_proxy(patched_port) as busy:
        running = busy.running
        connection = http.client.HTTPConnection("127.0.0.1", running.port)
        connection.request("POST", "/v1/chat/completions", json.dumps(CHAT), JSON)
        answer = connection.getresponse()
        assert answer.read1(5) and busy.queued() == 1
        answer.close()
        connection.close()
        until(lambda: not busy.queued())
        assert _without_comments(busy.post_and_free_slot("/v1/chat/completions", CHAT)).endswith(
            b"[DONE]\n\n"
        )
        labels = {"endpoint": "/v1/chat/completions", "code": "499"}
        # This client, and the one that kept the slot busy.
        assert running.metric("evoke_requests_total", **labels) == 2
        assert running.metric("evoke_upstream_errors_total", kind="upstream_unavailable") == 0


def test_comments_say_how_much_of_a_long_prompt_is_decoded(
    patched_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that give up after a while without data wait for the first token."""
    monkeypatch.setattr("evoke_proxy.engine.server.prefill_progress._POLL_S", 0.02)
    text = " ".join(f"Line {i} of this long text says nothing." for i in range(160))
    body = CHAT | {"messages": [{"role": "user", "content": text}]}
    with proxy(patched_port, limits__keepalive_s=0.05, policy__budget=None) as running:
        answer = ask(running.port, "POST", "/v1/chat/completions", json.dumps(body).encode(), JSON)
        shown = [
            tuple(map(int, match.groups()))
            for match in re.finditer(rb": decoding the prompt: (\d+) of (\d+) tokens", answer.body)
        ]
        assert answer.body.endswith(b"data: [DONE]\n\n") and b'"error"' not in answer.body
        assert shown == sorted(shown) and shown, answer.body[:300]
        assert {total for _, total in shown} == {shown[0][1]} and shown[0][1] > 2000
        assert all(0 <= done <= total for done, total in shown)
        sessions = json.loads(ask(running.port, "GET", "/evoke/sessions").body)["sessions"]
        assert [each["prefill"] for each in sessions] == [None]
