"""Observing replies: timings, usage and the finish reason, from streams and JSON bodies."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.reply import observer as observer_module
from evoke_proxy.core.reply.observer import KeyIndex, ReplyObserver

TIMINGS = {"cache_n": 40, "prompt_n": 2, "evoke": {"epoch": 7, "omitted": 3}}
USAGE = {"prompt_tokens": 42, "completion_tokens": 5}


def event(value: object, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value)}\n\n".encode()


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}


def end(reason: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


CHAT = b"".join(
    [
        b": waiting\n\n",
        event(delta('he said "timings" and "usage": {}')),
        event(delta("grüße\nthere")),
        event(end("stop") | {"timings": TIMINGS}),
        event({"choices": [], "usage": USAGE}),
        b"data: [DONE]\n\n",
    ]
)
RESPONSES = b"".join(
    [
        event({"type": "response.created", "response": {"status": "in_progress"}}),
        event({"type": "response.output_text.delta", "delta": "hi"}, "response.output_text.delta"),
        event(
            {
                "type": "response.completed",
                "response": {"status": "completed", "usage": USAGE},
                "timings": TIMINGS,
            }
        ),
    ]
)
MESSAGES = b"".join(
    [
        event({"type": "message_start", "message": {"usage": {"prompt_tokens": 42}}}),
        event(
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn"},
                "usage": {"completion_tokens": 5},
                "timings": TIMINGS,
            }
        ),
        event({"type": "message_stop"}),
    ]
)
COMPLETION = b"".join(
    [
        event({"content": "a", "stop": False}),
        event({"content": "", "stop": True, "stop_type": "eos", "timings": TIMINGS}),
        event({"usage": USAGE}),
    ]
)
STREAMS = {
    "stop": CHAT,
    "completed": RESPONSES,
    "end_turn": MESSAGES,
    "eos": COMPLETION,
}


def observe(data: bytes, cuts: list[int] | None = None) -> ReplyObserver:
    observer = ReplyObserver()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts or []), len(data)]
    for start, stop in zip(edges, edges[1:], strict=False):
        observer.feed(data[start:stop])
    observer.close()
    return observer


def summary(observer: ReplyObserver) -> tuple[object, ...]:
    return observer.timings, observer.usage, observer.finish, observer.done, observer.error


@pytest.mark.parametrize("finish", STREAMS)
def test_streams_of_all_dialects_are_observed(finish: str) -> None:
    assert summary(observe(STREAMS[finish])) == (TIMINGS, USAGE, finish, True, None)


@given(
    finish=st.sampled_from(sorted(STREAMS)),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    cuts=st.lists(st.integers(0, 5000), max_size=40),
)
def test_chunk_boundaries_and_line_ends_make_no_difference(
    finish: str, line_end: str, cuts: list[int]
) -> None:
    data = STREAMS[finish].replace(b"\n", line_end.encode())
    assert summary(observe(data, cuts)) == (TIMINGS, USAGE, finish, True, None)


@given(st.sampled_from(sorted(STREAMS)))
def test_single_bytes_give_the_same_result(finish: str) -> None:
    data = STREAMS[finish].replace(b"\n", b"\r\n")
    assert summary(observe(data, list(range(len(data))))) == (TIMINGS, USAGE, finish, True, None)


def test_an_incomplete_stream_is_not_done() -> None:
    observer = observe(CHAT[: CHAT.index(b"[DONE]")])
    assert observer.timings == TIMINGS
    assert not observer.done


def test_the_last_event_may_lack_its_blank_line() -> None:
    assert observe(CHAT.rstrip()).done


def test_the_last_timings_are_used() -> None:
    data = event({"timings": {"n": 1}}) + event({"timings": {"n": 2}})
    assert observe(data).timings == {"n": 2}


def test_data_lines_of_one_event_are_joined() -> None:
    assert observe(b'data: {"usage":\ndata: {"n": 3}}\n\n').usage == {"n": 3}


def test_an_error_within_a_stream_is_recorded() -> None:
    observer = observe(event(delta("a")) + event({"error": {"code": 500, "message": "boom"}}))
    assert observer.error == {"code": 500, "message": "boom"}
    assert not observer.done


@given(st.lists(st.integers(0, 400), max_size=10))
def test_a_json_body_in_pieces_is_observed_at_its_end(cuts: list[int]) -> None:
    body = end("length") | {"usage": USAGE, "timings": TIMINGS, "text": "grüße"}
    data = b"\n " + json.dumps(body, ensure_ascii=False).encode()
    assert summary(observe(data, cuts)) == (TIMINGS, USAGE, "length", True, None)


@pytest.mark.parametrize(
    ("body", "finish"),
    [
        ({"type": "message", "stop_reason": "max_tokens", "usage": {"n": 1}}, "max_tokens"),
        ({"object": "response", "status": "completed", "usage": {"n": 1}}, "completed"),
        ([{"content": "x", "stop": True, "stop_type": "limit", "usage": {"n": 1}}], "limit"),
    ],
)
def test_json_bodies_of_all_dialects_are_observed(body: object, finish: str) -> None:
    observer = observe(json.dumps(body).encode())
    assert (observer.finish, observer.usage, observer.done) == (finish, {"n": 1}, True)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"  ",
        b"{",
        b'{"timings": 3, "usage": []}',
        b"<html>busy</html>",
        b'data: {"timings": {"broken"\n\n',
        b'data: {"timings": 3}\n\ndata: "usage"\n\n',
        b'data: {"choices": [null], "usage": null, "timings": null}\n\n',
        b'data: {"a": "usage", "x": ' + b"[" * 5000 + b"\n\n",
    ],
)
def test_invalid_data_is_ignored(data: bytes) -> None:
    assert summary(observe(data)) == (None, None, None, False, None)


@pytest.mark.parametrize("start", [b"data: ", b"{"])
def test_memory_is_bounded(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer_module, "_MAX_EVENT_BYTES", 100_000)
    for name in ("MAX_PARSED_BYTES", "HEAD_BYTES", "TAIL_BYTES"):
        monkeypatch.setattr(observer_module, name, 100_000)
    observer = ReplyObserver()
    observer.feed(start)
    chunk = b'"timings" ' * 1000
    tracemalloc.start()
    for _ in range(500):
        observer.feed(chunk)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    if start == b"data: ":
        observer.feed(b"\n\n" + CHAT)
    observer.close()
    assert observer.timings == (TIMINGS if start == b"data: " else None)


def test_an_event_of_many_lines_is_limited_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer_module, "_MAX_EVENT_BYTES", 100)
    observer = ReplyObserver()
    for _ in range(50):
        observer.feed(b'data: "0123456789"\n')
        assert len(observer._events._event) <= 100


LARGE = {
    "chat": {"choices": [{"finish_reason": "length", "index": 0, "message": {"content": "@"}}]},
    "messages": {"content": [{"type": "text", "text": "@"}], "stop_reason": "max_tokens"},
    "completion": {"content": "@", "stop": True, "stop_type": "limit"},
}


@pytest.mark.parametrize("kind", LARGE)
def test_of_a_large_body_only_both_ends_are_read(kind: str) -> None:
    misleading = '"usage": {"a": 1}, "timings": {"evoke": {}}, "finish_reason": "stop" é'
    text = json.dumps(misleading * 60_000)[1:-1]
    body = LARGE[kind] | {"usage": USAGE, "timings": TIMINGS}
    data = json.dumps(body).replace("@", text).encode()
    assert len(data) > 3 * 2**20
    observer = ReplyObserver()
    for at in range(0, len(data), 100_000):
        observer.feed(data[at : at + 100_000])
        assert len(observer._body) < 2_200_000
    observer.close()
    assert (observer.timings, observer.usage) == (TIMINGS, USAGE)
    assert observer.finish in ("length", "max_tokens", "limit") and observer.done


def test_the_probabilities_of_many_tokens_are_not_parsed() -> None:
    entry = {"token": " the", "bytes": [32, 116, 104, 101], "logprob": -1.25}
    choice = {"finish_reason": "length", "logprobs": {"content": [entry] * 10_000}}
    body = json.dumps({"choices": [choice], "usage": USAGE, "timings": TIMINGS}).encode()
    observer = ReplyObserver()
    observer.feed(body)
    start = time.thread_time()
    observer.close()
    assert 500_000 < len(body) < 1_000_000 and time.thread_time() - start < 0.015
    assert (observer.timings, observer.usage, observer.finish) == (TIMINGS, USAGE, "length")


def test_of_a_large_event_only_both_ends_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: object) -> object:
        raise AssertionError("the event is parsed")

    event = {"content": "a" * 1_500_000, "timings": TIMINGS, "usage": USAGE}
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    monkeypatch.setattr(observer_module.json, "loads", refused)
    observer = ReplyObserver()
    observer.feed(data)
    assert (observer.timings, observer.usage) == (TIMINGS, USAGE)


def test_the_keys_of_a_large_answer_are_found_in_one_pass() -> None:
    text = b'{"usage":{"a":1},"b":"\\"timings\\":{}"' + b', "usage" : {"c":2},"error":null'
    keys = KeyIndex(text + b',"status":"done","stop_type":7}')
    assert keys.last_object("usage") == (text.index(b'{"c"'), {"c": 2})
    assert keys.last_object("timings") is None and keys.last_object("error") is None
    assert keys.last_word("status") == "done" and keys.last_word("stop_type") is None


def test_the_end_of_a_large_answer_is_read_in_a_few_milliseconds() -> None:
    observer = ReplyObserver()
    for piece in (b'{"content":"', *[b"status reason error stop " * 10_000] * 20, b'"}'):
        observer.feed(piece)
    start = time.thread_time()
    observer.close()
    assert time.thread_time() - start < 0.006
