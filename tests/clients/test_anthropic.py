"""The `anthropic` library gets the same answers through the proxy as directly.

It is imported by the tests: each test process would need a second for that to collect them.
"""

from __future__ import annotations

from typing import Any

import pytest
from comparison import AskBoth
from harness import RunningProxy
from weather import QUESTION, TOOLS

TOOL = TOOLS["/v1/messages"]
# The start of a tool call. Of arguments that begin in it llama-server streams only the rest, since
# b11549, and the library cannot parse that.
CALL_PREFIX = "<tool_call>\n"
USER_MESSAGE = {"role": "user", "content": QUESTION}
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {
        "system": [{"type": "text", "text": "You are a helpful assistant."}],
        "messages": [
            {"role": "user", "content": "Remember: the door code of the Oslo lab is 4821."},
            {"role": "assistant", "content": "Got it."},
            {"role": "user", "content": [{"type": "text", "text": "What is the door code?"}]},
        ],
    },
    "tool call": {
        "messages": [USER_MESSAGE, {"role": "assistant", "content": CALL_PREFIX}],
        **TOOL,
    },
    "tool result": {
        "messages": [
            USER_MESSAGE,
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I look it up."},
                    {
                        "type": "tool_use",
                        "id": "use_1",
                        "name": "get_weather",
                        "input": {"city": "Oslo"},
                    },
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "use_1", "content": "rain and wind"}
                ],
            },
        ],
        "tools": TOOL["tools"],
    },
}
KINDS = pytest.mark.parametrize("kind", REQUESTS)


def client(port: int) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="any", max_retries=0)


def create(port: int, **fields: Any) -> Any:
    """Create a message; returns it, or the list of its raw events."""
    with client(port) as library:
        answer = library.messages.create(**fields)
        return list(answer) if fields.get("stream") else answer


def events(port: int, **fields: Any) -> list[Any]:
    """Stream a message; returns the library's events and its final message."""
    with client(port) as library, library.messages.stream(**fields) as stream:
        return [*stream, stream.get_final_message()]


def dumped(items: list[Any]) -> list[dict[str, Any]]:
    return [item.model_dump() for item in items]


def request_fields(kind: str) -> dict[str, Any]:
    """Return the arguments of a request with greedy sampling."""
    return {"model": "tiny", "max_tokens": 160, "extra_body": {"temperature": 0}} | REQUESTS[kind]


@KINDS
def test_messages_equal_direct_ones(ask_both: AskBoth, kind: str) -> None:
    direct, proxied = ask_both(lambda port: create(port, **request_fields(kind)).model_dump())
    assert proxied == direct
    assert "get_weather" in repr(proxied) or kind != "tool call"


@KINDS
def test_streamed_messages_equal_direct_ones(ask_both: AskBoth, kind: str) -> None:
    direct, proxied = ask_both(lambda port: dumped(events(port, **request_fields(kind))))
    assert proxied == direct
    assert len(proxied) > 5


@KINDS
def test_raw_stream_events_equal_direct_ones(ask_both: AskBoth, kind: str) -> None:
    direct, proxied = ask_both(
        lambda port: dumped(create(port, stream=True, **request_fields(kind)))
    )
    assert proxied == direct
    assert len(proxied) > 5


def test_token_counts_equal_direct_ones(direct_port: int, running: RunningProxy) -> None:
    counts = []
    for port in (direct_port, running.port):
        with client(port) as library:
            counted = library.messages.count_tokens(model="tiny", **REQUESTS["tool result"])
            counts.append(counted.input_tokens)
    assert counts[0] == counts[1] > 100
    assert running.metric("evoke_sessions") == 0


def test_fields_of_the_proxy_are_accepted_and_accounting_is_returned(running: RunningProxy) -> None:
    fields = request_fields("plain") | {"extra_body": {"temperature": 0, "evoke_budget": 400}}
    streamed = events(running.port, **fields)
    (delta,) = [event for event in streamed[:-1] if event.type == "message_delta"]
    for usage in (create(running.port, **fields).usage, delta.usage):
        accounting = usage.model_extra["evoke"]
        assert accounting["decoded"] + accounting["recovered"] + accounting["resident_before"] > 20
        assert (accounting["omitted"], accounting["budget"]) == (0, 400)


def test_errors_raise_the_exceptions_of_the_library(
    direct_port: int, running: RunningProxy
) -> None:
    import anthropic

    errors = []
    for port in (direct_port, running.port):
        with pytest.raises(anthropic.APIStatusError) as refused:
            create(port, **request_fields("plain") | {"messages": [{"role": "user", "content": 7}]})
        errors.append((refused.value.status_code, refused.value.body))
    assert errors[0] == errors[1]
    invalid = request_fields("plain") | {"extra_body": {"evoke_budget": "much"}}
    with pytest.raises(anthropic.BadRequestError) as refused_by_proxy:
        create(running.port, **invalid)
    body: Any = refused_by_proxy.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert "evoke_budget" in body["error"]["message"]
