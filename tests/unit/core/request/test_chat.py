"""Parsing chat requests: limits, bypass reasons and query."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.request.chat import (
    ChatRequest,
    RequestOptions,
    parse_chat,
)
from evoke_proxy.core.retrieval.query import query_of

HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> ChatRequest:
    return parse_chat("chat", HELLO | fields)


def query(*messages: tuple[str, str]) -> str:
    body = {"messages": [{"role": role, "content": text} for role, text in messages]}
    return parse_chat("chat", body).query


def test_a_plain_request_has_the_defaults() -> None:
    request = chat()
    assert request == ChatRequest(
        "chat", request.messages, None, False, 1, False, cache_prompt=True,
        options=RequestOptions(), keys=request.keys,
    )  # fmt: skip
    assert [message.role for message in request.messages] == [Role.USER]
    assert request.bypass() == ""


def test_each_dialect_has_its_own_field_for_the_answers_limit() -> None:
    assert parse_chat("responses", {"input": "hi", "max_output_tokens": 9}).max_tokens == 9
    assert parse_chat("messages", HELLO).max_tokens == 4096
    assert parse_chat("completions", {"prompt": "hi", "n_predict": 9}).max_tokens == 9
    with pytest.raises(KeyError):
        parse_chat("smoke signals", {})


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 9}, 9),
        ({"max_completion_tokens": 8, "max_tokens": 9}, 8),
        ({"n_predict": 7, "max_completion_tokens": 8, "max_tokens": 9}, 7),
        ({"max_tokens": -1}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": "9"}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": 0}, 0),
    ],
)
def test_the_answers_limit_follows_the_servers_precedence(
    fields: dict[str, Any], limit: int | None
) -> None:
    assert chat(**fields).max_tokens == limit


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"evoke": False}, "disabled"),
        ({"n": 2}, "n"),
        ({"n_cmpl": 2}, "n"),
        ({"messages": [{"content": [{"type": "image_url"}]}]}, "media"),
        ({"cache_prompt": False}, "cache_prompt"),
        ({"n": 1, "cache_prompt": True, "evoke": True}, ""),
        ({"n": None}, ""),
    ],
)
def test_a_request_that_cannot_be_budgeted_has_a_bypass_reason(
    fields: dict[str, Any], reason: str
) -> None:
    assert chat(**fields).bypass() == reason
    assert chat(**fields).bypass(media=True) == ("" if reason == "media" else reason)


def test_several_prompts_count_as_several_answers() -> None:
    assert parse_chat("completions", {"prompt": ["a", "b"]}).n == 2
    assert parse_chat("completions", {"prompt": [1, 2, 3]}).n == 1
    assert parse_chat("completions", {"prompt": ["a"]}).n == 1


def test_the_query_is_the_text_since_the_last_answer() -> None:
    assert query(("user", "a"), ("assistant", "b"), ("user", "c"), ("user", "d")) == "c\nd"
    assert query(("user", "a"), ("assistant", "b"), ("tool", "c"), ("system", "no")) == "c"
    assert query(("system", "s"), ("user", "a")) == "a"
    assert query(("user", "a"), ("assistant", "the client begins the ans")) == "a"
    assert query(("assistant", "b")) == ""
    assert query() == ""


@pytest.mark.parametrize(
    ("arguments", "query_text"),
    [
        ('{"path":"src/a.py","line":7,"deep":{"x":["y"]},"dry":true}', "src/a.py\n7\ny\nlong"),
        ('"src/a.py"', "src/a.py\nlong"),
        ("src/a.py", "src/a.py\nlong"),
        (json.dumps(["a"] * 20), "a\n" * 16 + "long"),
        (json.dumps({"path": "a", "content": "x" * 5000}), "a\n" + "x" * 200 + "\nlong"),
    ],
)
def test_the_arguments_of_an_answered_tool_call_are_in_the_query(
    arguments: str, query_text: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "long"},
    ]
    assert parse_chat("chat", {"messages": messages}).query == query_text
    path = json.loads(arguments).get("path", "") if arguments.startswith("{") else ""
    assert parse_chat("chat", {"messages": messages}).files == ((path,) if path else ())
    # a call without a result is not in the query
    assert parse_chat("chat", {"messages": messages[:2]}).query == "a"
    assert parse_chat("chat", {"messages": messages[:2]}).files == ()


def _with_calls(arguments: list[str]) -> ChatRequest:
    """Return a request whose last answer has a tool call with each of these arguments."""
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "read", "arguments": each}}
        for i, each in enumerate(arguments)
    ]
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c0", "content": "long"},
    ]
    return parse_chat("chat", {"messages": messages})


def test_arguments_that_take_long_to_parse_are_not_parsed() -> None:
    many = json.dumps({"path": "many", "lines": [1] * 20_000})
    large = json.dumps({"path": "large", "content": "x" * (2 << 20)})
    chat = _with_calls([many, '{"path": "first"}', large, '{"path": "second"}'])
    assert chat.files == ("first", "second")
    assert chat.query.split("\n") == [many[:200], "first", large[:200], "second", "long"]
    assert len(_with_calls([json.dumps({"path": str(i)}) for i in range(4000)]).files) == 64


@pytest.mark.parametrize(
    "arguments",
    [json.dumps([1] * 500_000), json.dumps([int("1" * 4300)] * 200), json.dumps({"path": "a"})],
    ids=["elements", "digits", "calls"],
)
@pytest.mark.usefixtures("no_full_collections")
def test_the_tool_calls_of_a_large_body_are_read_in_milliseconds(arguments: str) -> None:
    chat = _with_calls([arguments] * min(4000, (4 << 20) // len(arguments)))
    began = time.thread_time()
    assert len(chat.query) + len(chat.files) > 0
    assert time.thread_time() - began < 0.025


def _with_results(n_results: int) -> ChatRequest:
    call = {"type": "tool_use", "id": "1", "name": "read", "input": {"path": "a.py"}}
    results = [{"type": "tool_result", "tool_use_id": "1", "content": "x"}] * n_results
    messages = [
        {"role": "user", "content": "Read it"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": results},
    ]
    return parse_chat("messages", {"messages": messages})


def test_a_message_with_very_many_results_is_queried_in_milliseconds() -> None:
    assert query_of(_with_results(1000)).files == ("a.py",)
    chat = _with_results(100_000)
    began = time.thread_time()
    assert query_of(chat).text.startswith("x\nx") and not chat.files
    assert time.thread_time() - began < 0.15


@pytest.mark.parametrize("messages", [None, 3, ["text"], [None], [{"role": 3, "content": {}}]])
def test_malformed_messages_are_left_for_the_server_to_refuse(messages: Any) -> None:
    assert isinstance(parse_chat("chat", {"messages": messages}), ChatRequest)
