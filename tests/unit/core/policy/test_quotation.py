"""Where a quotation is inserted into a request, in every dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evoke_proxy.core.model.blocks import Block, Role, Span
from evoke_proxy.core.policy.quotation import QuotedRequest, runs, with_note
from evoke_proxy.core.request.chat import parse_chat

NOTE = "Noted: the code is 48213.\n\n"
QUESTION = "What is the code?"


def block(start: int, end: int, message: int) -> Block:
    return Block(f"user:{message}#0", f"s/{start}", Span(start, end), Role.USER, 1, message, "x")


def noted(dialect: str, body: dict[str, Any]) -> QuotedRequest | None:
    return with_note(parse_chat(dialect, body), json.dumps(body).encode(), NOTE, [block(0, 9, 0)])


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("dialect", "body", "path", "expected"),
    [
        ("chat", {"messages": [user(QUESTION)]}, ("messages", 0, "content"), NOTE + QUESTION),
        (
            "chat",
            {"messages": [user("Hi"), user(QUESTION), {"role": "assistant", "content": "It"}]},
            ("messages", 1, "content"),
            NOTE + QUESTION,
        ),
        (
            "chat",
            {"messages": [user([{"type": "text", "text": QUESTION}])]},
            ("messages", 0, "content"),
            [{"type": "text", "text": NOTE}, {"type": "text", "text": QUESTION}],
        ),
        (
            "chat",
            {"messages": [user("Hi"), {"role": "tool", "tool_call_id": "1", "content": "42"}]},
            ("messages", 1, "content"),
            NOTE + "42",
        ),
        ("responses", {"input": QUESTION}, ("input",), NOTE + QUESTION),
        (
            "responses",
            {
                "input": [
                    user("Hi"),
                    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "1", "output": "42"},
                ]
            },
            ("input", 2, "output"),
            NOTE + "42",
        ),
        ("messages", {"messages": [user(QUESTION)]}, ("messages", 0, "content"), NOTE + QUESTION),
        (
            "messages",
            {
                "messages": [
                    user([{"type": "tool_result", "tool_use_id": "1", "content": "42"}]),
                ]
            },
            ("messages", 0, "content", 0, "content"),
            NOTE + "42",
        ),
    ],
)
def test_a_note_is_the_beginning_of_the_last_message_of_a_user_or_a_tool(
    dialect: str, body: dict[str, Any], path: tuple[str | int, ...], expected: object
) -> None:
    quoted = noted(dialect, body)
    assert quoted is not None
    value = json.loads(quoted.body)
    for key in path:
        value = value[key]
    assert value == expected
    assert quoted.blocks == (block(0, 9, 0),) and not quoted.is_past


def test_the_rest_of_the_body_and_the_other_messages_are_unchanged() -> None:
    body = {"model": "m", "messages": [user("Hi"), user(QUESTION)], "temperature": 0.5}
    quoted = noted("chat", body)
    assert quoted is not None
    changed = json.loads(quoted.body)
    assert changed | {"messages": body["messages"]} == body
    assert changed["messages"][0] == user("Hi")
    assert [message.text for message in quoted.request.messages] == ["Hi", NOTE + QUESTION]


def test_a_request_without_a_user_message_has_no_place_for_a_note() -> None:
    assert noted("chat", {"messages": [{"role": "system", "content": "Be brief."}]}) is None


def test_directly_following_blocks_of_one_message_are_one_run() -> None:
    first, second, gap, other = block(0, 5, 0), block(5, 9, 0), block(12, 15, 0), block(15, 20, 1)
    assert runs([first, second, gap, other]) == [[first, second], [gap], [other]]
    assert runs([]) == []
