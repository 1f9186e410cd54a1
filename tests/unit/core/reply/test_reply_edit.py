"""Edits of replies: token accounting in the usage, and advice in the error of a too long prompt."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evoke_proxy.core.reply import reply_edit
from evoke_proxy.core.reply.reply_edit import UsageEditor, with_accounting, with_context_advice

ACCOUNTING = {
    "decoded": 3,
    "recovered": 64,
    "resident_before": 200,
    "omitted": 900,
    "n_prompt": 1167,
    "n_resident_peak": 300,
    "budget": 320,
}
ADDED = (
    b'"evoke":{"decoded":3,"recovered":64,"resident_before":200,"omitted":900,'
    b'"resident_peak":300,"budget":320}'
)
TIMINGS = json.dumps({"cache_n": 264, "evoke": ACCOUNTING}).encode()

DOCUMENTS = {
    "chat": b'{"choices":[], "usage" : {"total_tokens":1.50e1},"timings":%b}' % TIMINGS,
    "responses": b'{"output":[],"usage" : {"total_tokens":2},"timings":%b}' % TIMINGS,
    "completed": b'{"timings":%b,"response":{"usage" : {"total_tokens":2}}}' % TIMINGS,
    "message_delta": b'{"type":"message_delta","usage" : {"o":5},"timings":%b}' % TIMINGS,
}
UNTOUCHED = [
    b"",
    b"[DONE]",
    b'{"choices":[],"timings":%b}' % TIMINGS,
    b'{"usage":{"total_tokens":2},"timings":{"cache_n":1},"evoke":1}',
    b'{"usage":null,"timings":%b}' % TIMINGS,
    b'{"usage":{"total_tokens":2},"timings":{"evoke":{"decoded":"many"}}}',
    b'{"usage":{"total_tokens":2},"timings":%b' % TIMINGS,
    b'{"message":{"usage":{"input_tokens":2}},"timings":%b}' % TIMINGS,
    b'["usage",{"evoke":{}}]',
    b'{"usage":{"a":NaN},"timings":%b}' % TIMINGS,
]


def expected(document: bytes) -> bytes:
    return document.replace(b'"usage" : {', b'"usage" : {' + ADDED + b",")


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_the_token_accounting_is_added_to_the_usage_and_nothing_else_changes(
    document: bytes,
) -> None:
    assert with_accounting(document, {}) == expected(document) != document


@pytest.mark.parametrize("document", UNTOUCHED)
def test_a_document_without_usage_or_accounting_is_unchanged(document: bytes) -> None:
    assert with_accounting(document, {}) == document


def test_without_a_budget_its_field_is_null() -> None:
    timings: dict[str, Any] = {"evoke": ACCOUNTING | {"budget": 0}}
    edited = json.loads(with_accounting(json.dumps({"usage": {}, "timings": timings}).encode(), {}))
    assert edited["usage"]["evoke"]["budget"] is None


LINES = [b"data: " + document for document in DOCUMENTS.values()]
EDITED = [b"data: " + expected(document) for document in DOCUMENTS.values()]
STREAM = b": ping\n\nevent: x\r\n" + b"\r\n\r\n".join(LINES) + b'\n\nretry: 1\n\ndata:{"usage"'
OUT = b": ping\n\nevent: x\r\n" + b"\r\n\r\n".join(EDITED) + b'\n\nretry: 1\n\ndata:{"usage"'


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_a_stream_is_edited_the_same_however_it_is_divided(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    edit = UsageEditor({})
    out = [edit.feed(STREAM[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    assert b"".join(out) + edit.close() == OUT


def test_complete_lines_are_passed_on_at_once() -> None:
    edit = UsageEditor({})
    assert edit.feed(b": ping\n\n") == b": ping\n\n"
    assert edit.feed(b"data: {}\n\nda") == b"data: {}\n\n"
    assert edit.feed(b"ta: {}\n") == b"data: {}\n"


def test_an_overlong_line_is_passed_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_edit, "_MAX_LINE_BYTES", 10)
    edit = UsageEditor({})
    assert edit.feed(b"data: 1") == b""
    assert edit.feed(b"2345") == b"data: 12345"
    assert edit.feed(b"6") == b"6"
    assert edit.feed(b'7\ndata: "a"\n') == b'7\ndata: "a"\n'
    assert edit.close() == b""


@pytest.mark.parametrize("document", [*DOCUMENTS.values(), *UNTOUCHED[:6]])
def test_a_large_document_is_edited_without_being_parsed(
    document: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b'"text":"%b",' % (rb"\"usage\": {\"a\": 1} ".replace(b"\\", b"\\") * 70_000)
    large = document.replace(b"{", b"{" + text, 1) if document.startswith(b"{") else document
    expected_document = expected(large) if document in DOCUMENTS.values() else large

    def refused(_: object) -> object:
        raise AssertionError("the document is parsed")

    if len(large) > 1_000_000:
        monkeypatch.setattr(reply_edit.json, "loads", refused)
    assert with_accounting(large, {}) == expected_document


def test_probabilities_of_tokens_do_not_make_an_edit_long() -> None:
    """A document below the limit for large ones, with the values of 400 tokens."""
    entry = {"id": 1, "token": " the", "bytes": [32, 116, 104, 101], "logprob": -1.25}
    content = [entry | {"top_logprobs": [entry] * 20}] * 400
    document = b'{"choices":[{"logprobs":{"content":%b}}], "usage" : {"n":1},"timings":%b}'
    document %= (json.dumps(content).encode(), TIMINGS)
    assert 500_000 < len(document) < 1_000_000
    start = time.thread_time()
    edited = with_accounting(document, {})
    assert time.thread_time() - start < 0.05 and edited == expected(document)


TOO_LONG = (
    "request (6149 tokens) exceeds the available context size (1024 tokens), try increasing it"
)
CHAT_ERROR = {
    "error": {"code": 400, "message": TOO_LONG, "type": "exceed_context_size_error", "n_ctx": 1}
}
MESSAGES_ERROR = {"type": "error", "error": {"type": "invalid_request_error", "message": TOO_LONG}}


@pytest.mark.parametrize("error", [CHAT_ERROR, MESSAGES_ERROR])
def test_advice_with_the_option_is_added_to_the_message(error: dict[str, object]) -> None:
    edited = json.loads(with_context_advice(json.dumps(error).encode()))
    message = edited["error"].pop("message")
    assert message.startswith(TOO_LONG)
    assert "--ctx-logical" in message
    assert edited["error"] == {k: v for k, v in error["error"].items() if k != "message"}  # type: ignore[attr-defined]
    assert edited.get("type") == error.get("type")


def test_at_the_trained_length_a_shorter_chat_is_advised() -> None:
    message = json.loads(with_context_advice(json.dumps(CHAT_ERROR).encode(), True))["error"][
        "message"
    ]
    assert message.startswith(TOO_LONG) and "--ctx-logical" not in message
    assert "shorten the chat" in message and "RoPE scaling" in message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"error":{"message":"no such model"}}',
        b'{"error":"exceeds the available context size"}',
        b'{"error":{"message":3},"x":"exceeds the available context size"}',
        b'["exceeds the available context size"]',
        b"exceeds the available context size",
        b'{"error":{"message":"exceeds the available context size"}',
    ],
)
def test_any_other_error_is_unchanged(body: bytes) -> None:
    assert with_context_advice(body) == body
