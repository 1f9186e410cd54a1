"""Converting a responses body to a chat body, as llama-server does."""

from __future__ import annotations

from typing import Any

import pytest

from evoke_proxy.core.request.converters import responses_to_chat


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
