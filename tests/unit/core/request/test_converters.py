"""Converting a messages (Anthropic) body to a chat body, as llama-server does."""

from __future__ import annotations

from typing import Any

import pytest

from evoke_proxy.core.request.converters import anthropic_to_chat, responses_to_chat


def _converted(**body: Any) -> list[Any]:
    messages: list[Any] = anthropic_to_chat(body)["messages"]
    return messages


@pytest.mark.parametrize(
    ("line", "end"),
    [
        ("x-anthropic-billing-header: a=1; cch=a5145;You are", "cch=fffff;You are"),
        ("x-anthropic-billing-header: a=1; cch=a51;You are", "cch=a51;You are"),
        ("x-anthropic-billing-header: a=1;You are", "a=1;You are"),
        ("You are cch=a5145;", "You are cch=a5145;"),
    ],
)
def test_the_hash_of_a_billing_header_is_masked_as_the_server_does(line: str, end: str) -> None:
    for system in (line, [{"type": "text", "text": line}]):
        (message,) = _converted(system=system, messages=[])
        assert message["role"] == "system" and message["content"].endswith(end)
        assert len(message["content"]) == len(line)


def test_the_blocks_of_a_message_are_joined_and_each_result_is_a_message() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1, "b": "\u00e9"}}
    thought, text = {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "4"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [text, text]},
        {"type": "tool_result", "tool_use_id": "t3"},
    ]
    assistant, *rest = _converted(
        messages=[
            {"role": "assistant", "content": [thought, text, call]},
            {"role": "user", "content": [*results, text]},
            {"role": "user", "content": "plain"},
            {"role": "assistant"},
        ]
    )
    function = {"name": "f", "arguments": '{"a":1,"b":"\u00e9"}'}
    assert assistant == {
        "role": "assistant",
        "content": [text],
        "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        "reasoning_content": "hm",
    }
    assert [item["role"] for item in rest] == ["user", "tool", "tool", "tool", "user"]
    assert [item["content"] for item in rest[1:4]] == ["4", "soso", ""]


def test_tools_and_options_are_converted_and_metadata_is_dropped() -> None:
    body = {
        "messages": [],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "chat_template_kwargs": {"x": 1},
        "metadata": {},
    }
    chat = anthropic_to_chat(body)
    assert chat["tools"][0]["function"]["parameters"] == {"type": "object"}
    assert chat["tool_choice"] == "required" and chat["thinking_budget_tokens"] == 5
    assert chat["chat_template_kwargs"] == {"x": 1} and "metadata" not in chat


@pytest.mark.parametrize("body", [{}, {"messages": 3}, {"messages": [1, {}]}, {"system": 3}])
def test_a_malformed_anthropic_body_raises_no_exception(body: dict[str, Any]) -> None:
    assert isinstance(anthropic_to_chat(body)["messages"], list)


def test_consecutive_assistant_items_become_one_message() -> None:
    output_text = {"type": "output_text", "text": "so"}
    chat = responses_to_chat(
        {
            "instructions": "Help.",
            "input": [
                {"role": "user", "content": "one", "type": "message", "status": "done"},
                {"type": "reasoning", "summary": [], "content": [{"text": "hm"}]},
                {"type": "message", "role": "assistant", "content": [output_text]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "4"},
                {"role": "user", "content": [{"type": "input_text", "text": "two"}]},
            ],
            "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}],
            "reasoning": {"effort": "low"},
            "max_output_tokens": 3,
            "temperature": 0,
        }
    )
    system, first, assistant, result, second = chat["messages"]
    assert system == {"role": "system", "content": "Help."}
    assert first == {"role": "user", "content": [{"text": "one", "type": "text"}]}
    assert assistant == {
        "role": "assistant",
        "content": [{"text": "so", "type": "text"}],
        "reasoning_content": "hm",
        "tool_calls": [
            {"function": {"arguments": "{}", "name": "f"}, "id": "c", "type": "function"}
        ],
    }
    assert result == {"content": "4", "role": "tool", "tool_call_id": "c"}
    assert second["content"] == [{"text": "two", "type": "text"}]
    assert chat["tools"] == [{"type": "function", "function": {"strict": True, "name": "f"}}]
    assert chat["reasoning_effort"] == "low" and chat["temperature"] == 0
    assert not {"input", "instructions", "reasoning", "max_output_tokens"} & chat.keys()


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        ({}, []),
        ({"input": 3}, []),
        ({"input": [1, {}]}, [{}, {}]),
        ({"input": "hi"}, [{"role": "user", "content": "hi"}]),
        ({"tools": 5, "input": "hi"}, [{"role": "user", "content": "hi"}]),
        ({"input": [{"role": "user", "content": [5]}]}, [{"role": "user", "content": []}]),
    ],
)
def test_a_malformed_responses_body_raises_no_exception(
    body: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    assert responses_to_chat(body)["messages"] == messages
