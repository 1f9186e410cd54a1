"""Reading the messages of a body in each dialect."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.request.messages import (
    Message,
    ToolCall,
    from_anthropic,
    from_chat,
    from_completion,
    from_responses,
    has_media,
)

CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path":"a"}'}}


def test_each_chat_message_is_one_message() -> None:
    found = from_chat(
        {
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "no type"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL, "odd"]},
                {"role": "tool", "content": "b", "tool_call_id": "c1", "name": "read"},
                "odd",
                {"role": "user", "content": 3, "evoke_keep": "pin", "evoke_name": "notes"},
            ]
        }
    )
    assert found == [
        Message(Role.SYSTEM, "be brief"),
        Message(Role.USER, "a"),
        Message(Role.ASSISTANT, tool_calls=(ToolCall("c1", "read", '{"path":"a"}'),)),
        Message(Role.TOOL, "b", name="read", tool_call_id="c1"),
        Message(Role.USER),
        Message(Role.USER, keep="pin", block_name="notes"),
    ]


@pytest.mark.parametrize("messages", [None, "text", {}, 3])
def test_a_body_without_a_message_list_has_no_messages(messages: object) -> None:
    assert from_chat({"messages": messages}) == []
    assert from_anthropic({"messages": messages}) == []


def test_arguments_given_as_an_object_become_text() -> None:
    call = {"function": {"name": "read", "arguments": {"path": "ä"}}}
    [message] = from_chat({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert message.tool_calls == (ToolCall("", "read", '{"path":"ä"}'),)


def test_the_printed_text_of_a_message_ends_before_calls_of_any_length() -> None:
    long = ToolCall("1", "write", "x" * (3 << 20))
    printed = Message(Role.ASSISTANT, "ok", tool_calls=(long, long, long)).printed
    assert printed == f"ok\nwrite {long.arguments}"


def test_the_printed_text_of_a_message_includes_its_calls() -> None:
    call = ToolCall("c", "read", "{}")
    assert Message(Role.ASSISTANT, "ok", tool_calls=(call, call)).printed == "ok\nread {}\nread {}"
    assert Message(Role.ASSISTANT, tool_calls=(call,)).printed == "read {}"


def test_a_raw_prompt_is_one_message() -> None:
    assert from_completion({"prompt": "once"}) == [Message(Role.USER, "once")]
    assert from_completion({"prompt": [1, 2]}) == [Message(Role.USER, "")]


def test_consecutive_assistant_items_of_responses_are_joined() -> None:
    found = from_responses(
        {
            "instructions": "be brief",
            "input": [
                {"role": "user", "content": "hi", "evoke_keep": "prefer"},
                {"type": "reasoning", "summary": [], "content": [{"text": "hm"}]},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "let me see"}],
                },
                {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "list", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "one"},
                {
                    "type": "function_call_output",
                    "call_id": "c2",
                    "output": [{"type": "input_text", "text": "two"}],
                },
                {"role": "user", "content": [{"type": "input_text", "text": "and?"}]},
            ],
        }
    )
    assert found == [
        Message(Role.SYSTEM, "be brief"),
        Message(Role.USER, "hi", keep="prefer"),
        Message(
            Role.ASSISTANT,
            "let me see",
            tool_calls=(ToolCall("c1", "read", "{}"), ToolCall("c2", "list", "{}")),
        ),
        Message(Role.TOOL, "one", tool_call_id="c1"),
        Message(Role.TOOL, "two", tool_call_id="c2"),
        Message(Role.USER, "and?"),
    ]


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (from_anthropic, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        (from_responses, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ],
)
def test_a_message_with_only_an_image_is_counted(
    read: Callable[[dict[str, object]], Sequence[Message]], body: dict[str, object]
) -> None:
    assert read(body) == [Message(Role.USER)]


def test_an_item_that_is_not_an_object_is_a_message_without_text() -> None:
    assert from_responses({"input": [None, "a"]}) == [Message(Role.USER), Message(Role.USER)]
    assert from_anthropic({"messages": [None, "a"]}) == [Message(Role.USER), Message(Role.USER)]


def test_texts_of_one_assistant_are_joined_as_llama_server_joins_them() -> None:
    items = [{"type": "message", "role": "assistant", "content": text} for text in ("a", "b")]
    assert from_responses({"input": items}) == [Message(Role.ASSISTANT, "a\nb", joints=(1,))]


def test_a_responses_input_may_be_a_text() -> None:
    assert from_responses({"input": "hi"}) == [Message(Role.USER, "hi")]


def test_a_joined_message_keeps_the_marks_of_either_part() -> None:
    item = {"type": "function_call", "call_id": "c", "name": "n", "arguments": ""}
    marked = {"role": "assistant", "content": "b", "evoke_keep": "pin", "evoke_name": "plan"}
    for items in ([item, marked], [marked, item]):
        [message] = from_responses({"input": items})
        assert (message.keep, message.block_name, message.text) == ("pin", "plan", "b")


def test_each_anthropic_tool_result_is_a_message() -> None:
    found = from_anthropic(
        {
            "system": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm"},
                        {"type": "text", "text": "let me see"},
                        {"type": "tool_use", "id": "c1", "name": "read", "input": {"path": "a"}},
                    ],
                },
                {
                    "role": "user",
                    "evoke_keep": "pin",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
                        {
                            "type": "tool_result",
                            "tool_use_id": "c2",
                            "content": [
                                {"type": "text", "text": "t"},
                                {"type": "text", "text": "wo"},
                            ],
                        },
                        {"type": "text", "text": "and?"},
                    ],
                },
            ],
        }
    )
    assert found == [
        Message(Role.SYSTEM, "be brief"),
        Message(Role.USER, "hi"),
        Message(Role.ASSISTANT, "let me see", tool_calls=(ToolCall("c1", "read", '{"path":"a"}'),)),
        Message(Role.USER, "and?", keep="pin"),
        Message(Role.TOOL, "one", tool_call_id="c1", keep="pin"),
        Message(Role.TOOL, "two", tool_call_id="c2", keep="pin"),
    ]


def test_anthropic_messages_that_render_to_nothing_are_left_out() -> None:
    def count(message: dict[str, object]) -> int:
        return len(from_anthropic({"messages": [message]}))

    assert count({"role": "assistant"}) == 0
    assert count({"role": "user"}) == 1
    assert count({"role": "assistant", "content": []}) == 0
    assert count({"role": "assistant", "content": [{"type": "thinking", "thinking": ""}]}) == 0
    assert count({"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}) == 1
    assert count({"role": "user", "content": [{"type": "tool_result"}]}) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        {"messages": [{"content": [{"type": "input_audio"}]}]},
        {"messages": [{"content": [{"type": "image"}]}]},
        {"messages": [{"content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
        {"input": [{"content": [{"type": "input_image"}]}]},
        {"input": [{"type": "function_call_output", "output": [{"type": "input_image"}]}]},
    ],
)
def test_media_is_found_wherever_a_dialect_puts_it(body: dict[str, object]) -> None:
    assert has_media(body, {})


def test_text_is_not_found_as_media() -> None:
    assert not has_media({"messages": [{"content": "image"}, {"content": [{"type": "text"}]}]}, {})
    assert not has_media({"input": "image"}, {})


@pytest.mark.parametrize("depth", [10, 5000])
def test_arguments_of_a_call_may_have_any_depth(depth: int) -> None:
    """Arguments that are too deep are read as empty; llama-server refuses them."""
    nested: list[object] = []
    for _ in range(depth):
        nested = [nested]
    call = {"id": "c1", "function": {"name": "read", "arguments": nested}}
    use = {"type": "tool_use", "id": "c1", "name": "read", "input": nested}
    (one,) = from_chat({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    (other,) = from_anthropic({"messages": [{"role": "assistant", "content": [use]}]})
    for message in (one, other):
        (read,) = message.tool_calls
        assert read.name == "read" and read.arguments == ("[" * 11 + "]" * 11) * (depth == 10)


def test_arguments_of_many_elements_that_are_no_text_are_not_encoded() -> None:
    """Encoding them would stop the event loop for as long as 80 ms within the limits of a body."""
    large: list[object] = [[1] * 70_000, {"path": "a.py", "lines": [[1] * 7_000] * 10}]
    for arguments in (*large, {"path": "a.py", "content": "x" * 900_000}):
        call = {"id": "c1", "function": {"name": "write", "arguments": arguments}}
        use = {"type": "tool_use", "id": "c1", "name": "write", "input": arguments}
        (one,) = from_chat({"messages": [{"role": "assistant", "tool_calls": [call]}]})
        (other,) = from_anthropic({"messages": [{"role": "assistant", "content": [use]}]})
        for message in (one, other):
            (read,) = message.tool_calls
            assert (read.arguments == "") == (arguments in large)
            assert read.path == ("" if arguments in large else "a.py")


@pytest.mark.parametrize(("n_path", "n_content"), [(1000, 900_000), (1001, 0), (10, 1_000_000)])
def test_long_paths_and_paths_in_very_long_arguments_are_none(n_path: int, n_content: int) -> None:
    path = "p" * n_path
    call = ToolCall("c", "write", json.dumps({"path": path, "content": "x" * n_content}))
    assert call.path == (path if (n_path, n_content) == (1000, 900_000) else "")


def test_a_path_is_found_behind_a_long_text_and_not_in_long_lists() -> None:
    both = ToolCall("c", "edit", json.dumps({"file": "x" * 2000, "filename": " a.py "}))
    assert both.path == "a.py"
    for n_lines, path in ((16_000, "a.py"), (17_000, "")):
        assert ToolCall("c", "w", json.dumps({"path": "a.py", "x": [0] * n_lines})).path == path
