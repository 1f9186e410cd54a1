"""The `anthropic` package gets the same answers through the proxy as directly."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from comparison import AskBoth
from harness import RunningProxy
from weather import CALL_PREFIX, QUESTION, TOOLS

TOOL = TOOLS["/v1/messages"]
ASKED = {"role": "user", "content": QUESTION}
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {
        "system": [{"type": "text", "text": "You are a helpful assistant."}],
        "messages": [
            {"role": "user", "content": "Remember: the door code of the Oslo lab is 4821."},
            {"role": "assistant", "content": "Got it."},
            {"role": "user", "content": [{"type": "text", "text": "What is the door code?"}]},
        ],
    },
    "tool call": {"messages": [ASKED, {"role": "assistant", "content": CALL_PREFIX}], **TOOL},
    "tool result": {
        "messages": [
            ASKED,
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


def client(port: int) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="any", max_retries=0)


def create(port: int, **asked: Any) -> Any:
    """A message, or the list of its raw events."""
    with client(port) as asking:
        answer = asking.messages.create(**asked)
        return list(answer) if asked.get("stream") else answer


def events(port: int, **asked: Any) -> list[Any]:
    """The events the library makes of a stream, and the message it puts together."""
    with client(port) as asking, asking.messages.stream(**asked) as stream:
        return [*stream, stream.get_final_message()]


def dumped(items: list[Any]) -> list[dict[str, Any]]:
    return [item.model_dump() for item in items]


def given(kind: str) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 24, "extra_body": {"temperature": 0}} | REQUESTS[kind]


@KINDS
def test_messages(both_sides: AskBoth, kind: str) -> None:
    direct, proxied = both_sides(lambda port: create(port, **given(kind)).model_dump())
    assert proxied == direct
    assert "get_weather" in repr(proxied) or kind != "tool call"


@KINDS
def test_streamed_messages(both_sides: AskBoth, kind: str) -> None:
    direct, proxied = both_sides(lambda port: dumped(events(port, **given(kind))))
    assert proxied == direct
    assert len(proxied) > 5


@KINDS
def test_raw_events(both_sides: AskBoth, kind: str) -> None:
    direct, proxied = both_sides(lambda port: dumped(create(port, stream=True, **given(kind))))
    assert proxied == direct
    assert len(proxied) > 5


def test_counted_tokens(direct_port: int, between: RunningProxy) -> None:
    counts = []
    for port in (direct_port, between.port):
        with client(port) as asking:
            counted = asking.messages.count_tokens(model="tiny", **REQUESTS["tool result"])
            counts.append(counted.input_tokens)
    assert counts[0] == counts[1] > 100
    assert between.metric("evoke_sessions") == 0


def test_fields_of_the_proxy_are_accepted_and_accounting_is_returned(between: RunningProxy) -> None:
    asked = given("plain") | {"extra_body": {"temperature": 0, "evoke_budget": 400}}
    streamed = events(between.port, **asked)
    (delta,) = [event for event in streamed[:-1] if event.type == "message_delta"]
    for usage in (create(between.port, **asked).usage, delta.usage):
        accounting = usage.model_extra["evoke"]
        assert accounting["decoded"] + accounting["recovered"] + accounting["resident_before"] > 20
        assert (accounting["omitted"], accounting["budget"]) == (0, 400)


def test_errors_raise_the_exceptions_of_the_library(
    direct_port: int, between: RunningProxy
) -> None:
    told = []
    for port in (direct_port, between.port):
        with pytest.raises(anthropic.APIStatusError) as refused:
            create(port, **given("plain") | {"messages": [{"role": "user", "content": 7}]})
        told.append((refused.value.status_code, refused.value.body))
    assert told[0] == told[1]
    wrong = given("plain") | {"extra_body": {"evoke_budget": "much"}}
    with pytest.raises(anthropic.BadRequestError) as ours:
        create(between.port, **wrong)
    body: Any = ours.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert "evoke_budget" in body["error"]["message"]
