"""The `openai` library gets the same answers through the proxy as directly.

It is imported by the tests: each test process would need half a second for that to collect them.
"""

from __future__ import annotations

from typing import Any

import pytest
from comparison import AskBoth
from harness import RunningProxy
from weather import CALL, CALL_PREFIX, QUESTION, TOOLS

PLAIN: list[Any] = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Remember: the door code of the Oslo lab is 4821."},
    {"role": "assistant", "content": "Got it."},
    {"role": "user", "content": "What is the door code of the Oslo lab?"},
]
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": PLAIN},
    "tool call": {
        "messages": [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": CALL_PREFIX},
        ],
        **TOOLS["/v1/chat/completions"],
    },
    "tool result": {
        "messages": [
            {"role": "user", "content": QUESTION},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "rain and wind"},
        ],
        "tools": TOOLS["/v1/chat/completions"]["tools"],
    },
}
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {"instructions": PLAIN[0]["content"], "input": PLAIN[3]["content"]},
    "tool call": {
        "input": [
            {"role": "user", "content": QUESTION},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": CALL_PREFIX}],
            },
        ],
        **TOOLS["/v1/responses"],
    },
    "tool result": {
        "input": [
            {"role": "user", "content": QUESTION},
            {"type": "function_call", "call_id": "call_1", **CALL},
            {"type": "function_call_output", "call_id": "call_1", "output": "rain and wind"},
        ],
        "tools": TOOLS["/v1/responses"]["tools"],
    },
}
KINDS = pytest.mark.parametrize("kind", CHATS)
USAGE = {"include_usage": True}


def client(port: int) -> Any:
    import openai

    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0)


def chat(port: int, **fields: Any) -> Any:
    """Request a completion; returns it, or the list of its chunks."""
    defaults = {"model": "tiny", "temperature": 0, "max_tokens": 24}
    with client(port) as library:
        answer = library.chat.completions.create(**defaults | fields)
        return list(answer) if fields.get("stream") else answer


def respond(port: int, **fields: Any) -> Any:
    """Request a response; returns it, or the list of its events."""
    defaults = {"model": "tiny", "temperature": 0, "max_output_tokens": 24}
    with client(port) as library:
        answer = library.responses.create(**defaults | fields)
        return list(answer) if fields.get("stream") else answer


def dumped(items: list[Any]) -> list[dict[str, Any]]:
    return [item.model_dump() for item in items]


@KINDS
def test_chat_completions_equal_direct_ones(ask_both: AskBoth, kind: str) -> None:
    direct, proxied = ask_both(lambda port: chat(port, **CHATS[kind]).model_dump())
    assert proxied == direct
    assert "get_weather" in repr(proxied) or kind != "tool call"


@KINDS
def test_streamed_chat_completions_equal_direct_ones(ask_both: AskBoth, kind: str) -> None:
    def request(port: int) -> list[dict[str, Any]]:
        return dumped(chat(port, stream=True, stream_options=USAGE, **CHATS[kind]))

    direct, proxied = ask_both(request)
    assert proxied == direct
    assert len(proxied) > 3


@KINDS
def test_responses_equal_direct_ones(ask_both: AskBoth, kind: str) -> None:
    direct, proxied = ask_both(lambda port: respond(port, **RESPONSES[kind]).model_dump())
    assert proxied == direct
    assert "get_weather" in repr(proxied) or kind != "tool call"


@KINDS
def test_streamed_responses_equal_direct_ones(ask_both: AskBoth, kind: str) -> None:
    direct, proxied = ask_both(lambda port: dumped(respond(port, stream=True, **RESPONSES[kind])))
    assert proxied == direct
    assert dict(proxied[-1])["type"] == "response.completed"


def test_a_tool_call_and_the_answer_to_its_result_equal_direct_ones(ask_both: AskBoth) -> None:
    def request(port: int) -> list[Any]:
        call = chat(port, parallel_tool_calls=False, **CHATS["tool call"])
        message = call.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
        messages = [{"role": "user", "content": QUESTION}, message.model_dump(), result]
        tools = TOOLS["/v1/chat/completions"]["tools"]
        return [call.model_dump(), chat(port, messages=messages, tools=tools).model_dump()]

    direct, proxied = ask_both(request)
    assert proxied == direct


def test_fields_of_the_proxy_are_accepted_and_accounting_is_returned(running: RunningProxy) -> None:
    fields = {"extra_body": {"evoke_budget": 400}, "extra_headers": {"X-Evoke-Session": "mine"}}
    chunks = chat(running.port, messages=PLAIN, stream=True, stream_options=USAGE, **fields)
    events = respond(running.port, stream=True, **RESPONSES["plain"], **fields)
    for usage in (
        chat(running.port, messages=PLAIN, **fields).usage,
        chunks[-1].usage,
        respond(running.port, **RESPONSES["plain"], **fields).usage,
        events[-1].response.usage,
    ):
        accounting = usage.model_extra["evoke"]
        prompt = getattr(usage, "prompt_tokens", None) or usage.input_tokens
        assert (
            accounting["decoded"] + accounting["recovered"] + accounting["resident_before"]
            == prompt
        )
        assert (accounting["omitted"], accounting["budget"]) == (0, 400)


def test_errors_raise_the_exceptions_of_the_library(
    direct_port: int, running: RunningProxy
) -> None:
    import openai

    for request in (lambda port: chat(port, messages=3), lambda port: respond(port, input=[1])):
        errors = []
        for port in (direct_port, running.port):
            with pytest.raises(openai.APIStatusError) as refused:
                request(port)
            errors.append((refused.value.status_code, refused.value.body))
        assert errors[0] == errors[1]
    with pytest.raises(openai.BadRequestError) as refused_by_proxy:
        chat(running.port, messages=PLAIN, extra_body={"evoke_budget": "much"})
    assert refused_by_proxy.value.code == "evoke_budget_invalid"
