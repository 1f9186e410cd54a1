"""Reading the message of an answer, in each dialect, streamed or not."""

from __future__ import annotations

import json
from typing import Any

from evoke_proxy.core.reply.answer import AnswerReader


def _read(*parts: bytes) -> AnswerReader:
    reader = AnswerReader()
    for part in parts:
        reader.feed(part)
    return reader


def _whole(**message: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant"} | message}]}).encode()


def _events(*deltas: dict[str, Any]) -> bytes:
    chunks = [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    return "".join(f"data: {text}\n\n" for text in [*chunks, "[DONE]"]).encode()


def test_an_answer_is_read_from_a_body_or_a_stream_in_any_pieces() -> None:
    expected = {"role": "assistant", "content": "Hi \u2603"}
    assert _read(_whole(content="Hi \u2603")).message(False) == expected
    stream = _events(
        {"role": "assistant", "content": None}, {"content": "Hi"}, {"content": " \u2603"}
    )
    for cut in range(0, len(stream), 7):
        assert _read(b": waiting\n\n", stream[:cut], stream[cut:]).message(True) == expected


def test_the_thoughts_of_an_answer_are_in_the_message_only_on_request() -> None:
    reader = _read(_events({"reasoning_content": "hm"}, {"content": "Yes"}))
    assert reader.message(False) == {"role": "assistant", "content": "Yes"}
    assert reader.message(True) == {
        "role": "assistant", "content": "Yes", "reasoning_content": "hm"
    }  # fmt: skip


def test_an_answer_with_tool_calls_or_without_text_gives_no_message() -> None:
    call = {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}
    assert _read(_events({"content": "so"}, call)).message(False) is None
    assert _read(_whole(content="", tool_calls=[{"id": "1"}])).message(False) is None
    for data in (b"", b"{", b'{"error":{}}', b"data: {\n\n", b"<html>", _events({})):
        assert _read(data).message(False) is None


def test_an_answer_that_is_too_long_gives_no_message() -> None:
    reader = _read(b'{"choices":[{"message":{"content":"', b"x" * (5 << 20), b'"}}]}')
    assert reader.message(False) is None


def _json_events(*events: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def test_anthropic_answers_are_read_from_a_body_or_a_stream() -> None:
    blocks = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Yes"}]
    whole, streamed = AnswerReader(), AnswerReader()
    whole.feed(json.dumps({"type": "message", "content": blocks}).encode())
    streamed.feed(
        _json_events(
            {"type": "message_start", "message": {"content": []}},
            {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "hm"}},
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Yes"}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
        )
    )
    expected = {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}
    assert whole.message(True) == streamed.message(True) == expected
    with_call = AnswerReader()
    with_call.feed(_json_events({"content_block": {"type": "tool_use", "name": "f"}}))
    assert with_call.message(False) is None


def test_responses_answers_are_read_from_a_body_or_the_last_event() -> None:
    output = [
        {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "hm"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "Yes"}]},
    ]
    delta = {"type": "response.output_text.delta", "delta": "Yes"}
    last = {"type": "response.completed", "response": {"output": output}}
    whole, streamed = AnswerReader(), AnswerReader()
    whole.feed(json.dumps({"object": "response", "output": output}).encode())
    for event in (delta, last):
        streamed.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
    expected = {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}
    assert whole.message(True) == streamed.message(True) == expected
    with_call = AnswerReader()
    with_call.feed(json.dumps({"output": [{"type": "function_call", "name": "f"}]}).encode())
    assert with_call.message(False) is None


def test_an_answer_with_the_probabilities_of_many_tokens_is_not_read() -> None:
    """Its parser would let no other thread run."""
    probabilities = {"content": [{"bytes": [32]}] * 1000}
    for n_parts, is_read in ((1, True), (9, False)):
        choice = {"message": {"role": "assistant", "content": "Hi"}}
        document = {"choices": [choice | {"logprobs": [probabilities] * n_parts}]}
        message = _read(json.dumps(document).encode()).message(False)
        assert (message is not None) == is_read
