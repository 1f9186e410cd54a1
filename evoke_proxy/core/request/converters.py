"""Converts bodies of other dialects to chat completions.

The functions follow llama-server's own converters step by step (server-chat.cpp:
server_chat_convert_anthropic_to_oai and server_chat_convert_responses_to_chatcmpl), so that the
messages are those to which the spans of a rendering refer. They differ in three points: the marks
of the proxy are carried over to the messages, images lose their data, because requests with media
are never converted for rendering, and no body is refused: the result is arbitrary for a body that
llama-server refuses. A caller that renders the result compares its number of tokens with the
server's count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# The proxy's own fields of a message.
MESSAGE_FIELDS = ("evoke_keep", "evoke_name")

_BILLING = "x-anthropic-billing-header:"
# Elements of the arguments of a tool call: 0.1 to 0.2 microseconds each to encode.
_MAX_ELEMENTS = 65_536
_STAMP_CHARS = 5  # characters after cch=, which change with every request
_COPIED_KEYS = ("temperature", "top_p", "top_k", "stream", "chat_template_kwargs")


def json_arguments(value: Any) -> str:
    """Encode the arguments of a tool call as llama-server does.

    Returns an empty text for a value that is nested too deep, which llama-server refuses, and for
    one that takes more than a few milliseconds, because other threads cannot run meanwhile.
    """
    if is_larger(value, _MAX_ELEMENTS, with_text=False):
        return ""
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    except RecursionError:
        return ""


def is_larger(value: Any, limit: int, with_text: bool = True) -> bool:
    """Whether a value of JSON has more elements and characters than this; reads no more of it.

    Without `with_text`, only elements of objects and lists count.
    """
    counted = str | list | dict if with_text else list | dict
    pending, size = [value], 0
    while pending and size <= limit:
        one = pending.pop()
        if not isinstance(one, counted):
            continue
        size += len(one)
        if size <= limit and not isinstance(one, str):
            pending += [*one, *one.values()] if isinstance(one, dict) else one
    return size > limit


def anthropic_to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an Anthropic body to a chat body."""
    chat: dict[str, Any] = {"messages": anthropic_messages(body)}
    tools = body.get("tools")
    if isinstance(tools, list):
        chat["tools"] = [_anthropic_tool(item) for item in tools if isinstance(item, dict)]
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") in ("auto", "any", "tool"):
        chat["tool_choice"] = "auto" if choice["type"] == "auto" else "required"
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        chat["thinking_budget_tokens"] = thinking.get("budget_tokens", 10000)
    return chat | {key: body[key] for key in _COPIED_KEYS if key in body}


def anthropic_messages(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Convert the messages of an Anthropic body; each tool result becomes a separate message."""
    messages: list[Mapping[str, Any]] = []
    if (system := body.get("system")) is not None:
        messages.append({"role": "system", "content": _anthropic_system(system)})
    for item in _items(body.get("messages")):
        content = item.get("content")
        if isinstance(content, list):
            messages += _anthropic_blocks(item, objects(content))
        elif "content" in item or item.get("role") != "assistant":
            messages.append(item)
    return messages


def _anthropic_system(system: Any) -> str:
    if isinstance(system, str):
        return _unstamped(system)
    return "".join(
        _unstamped(string(block.get("text")))
        for block in objects(system)
        if block.get("type") == "text"
    )


def _unstamped(text: str) -> str:
    """Mask the part of Claude Code's billing line that changes with every request."""
    at = text.find("cch=", len(_BILLING)) + len("cch=")
    stamped = text.startswith(_BILLING) and at >= len("cch=")
    if not stamped or text[at + _STAMP_CHARS : at + _STAMP_CHARS + 1] != ";":
        return text
    return text[:at] + "f" * _STAMP_CHARS + text[at + _STAMP_CHARS :]


def _anthropic_blocks(
    item: Mapping[str, Any], blocks: Sequence[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """Convert a message of blocks: text and tool calls, then one message for each result."""
    content: list[Mapping[str, Any]] = []
    calls: list[Mapping[str, Any]] = []
    results: list[Mapping[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        match block.get("type"):
            case "text":
                content.append(block)
            case "image":
                content.append(_image())
            case "thinking":
                thoughts.append(string(block.get("thinking")))
            case "tool_use":
                calls.append(_anthropic_call(block))
            case "tool_result":
                results.append(_anthropic_result(block))
    reasoning, marks = "".join(thoughts), _marks(item)
    if content or calls or reasoning:
        message = {"role": string(item.get("role")), "content": content or ""}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        yield message | marks
    for result in results:
        yield {**result, **marks}


def _anthropic_result(block: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a tool result; texts without an image become one text."""
    content = block.get("content")
    parts = objects(content)
    texts = [string(part.get("text")) for part in parts if part.get("type") == "text"]
    images = [_image() for part in parts if part.get("type") == "image"]
    text = content if isinstance(content, str) else "".join(texts)
    return {
        "role": "tool",
        "tool_call_id": string(block.get("tool_use_id")),
        "content": [*map(_text_part, texts), *images] if images else text,
    }


def _anthropic_call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    function = {
        "name": string(block.get("name")),
        "arguments": json_arguments({} if arguments is None else arguments),
    }
    return {"id": string(block.get("id")), "type": "function", "function": function}


def _anthropic_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": string(tool.get("name")),
        "description": string(tool.get("description")),
        "parameters": tool.get("input_schema", {}),
    }
    return {"type": "function", "function": function}


# Members that the converter removes or moves.
_CONVERTED = ("input", "instructions", "tools", "max_output_tokens", "reasoning")


def responses_to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a responses body to a chat body."""
    chat = {key: value for key, value in body.items() if key not in _CONVERTED}
    chat["messages"] = responses_messages(body)
    tools = [_responses_tool(tool) for tool in objects(body.get("tools")) if _is_function(tool)]
    reasoning = body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    chat |= {"tools": tools} if tools else {}
    return chat | ({"reasoning_effort": effort} if effort is not None else {})


def responses_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert the items of a responses body; successive assistant items become one message."""
    return _responses_messages(body)[0]


def responses_indexes(body: Mapping[str, Any]) -> list[int]:
    """For each item of `input`: the index of the message that it becomes or is added to."""
    return _responses_messages(body)[1]


def _responses_messages(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the messages of a responses body, and the message index of each item of `input`."""
    messages: list[dict[str, Any]] = []
    indexes: list[int] = []
    if "instructions" in body:
        messages.append({"role": "system", "content": string(body["instructions"])})
    items = body.get("input")
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
    for item in _items(items):
        _add_item(messages, item)
        indexes.append(len(messages) - 1)
    return messages, indexes


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Add an item as a new message, or to the last message of the assistant."""
    kind, role, content = item.get("type"), item.get("role"), item.get("content")
    rest = {key: item[key] for key in item if key not in ("type", "status")}
    if role in ("user", "system", "developer"):
        messages.append(rest | {"content": _chat_parts(content)})
    elif role == "assistant":
        message = _last_assistant(messages, item)
        message.setdefault("content", []).extend(_chat_parts(content))
    elif kind == "function_call":
        function = {
            "arguments": string(item.get("arguments")),
            "name": string(item.get("name")),
        }
        call = {"function": function, "id": string(item.get("call_id")), "type": "function"}
        _last_assistant(messages, item).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        result = {
            "content": output if isinstance(output, str) else _chat_parts(output),
            "role": "tool",
            "tool_call_id": string(item.get("call_id")),
        }
        messages.append(result | _marks(item))
    elif kind == "reasoning":
        message = _last_assistant(messages, item)
        message.setdefault("content", [])
        texts = [string(part.get("text")) for part in objects(content)]
        message |= {"reasoning_content": texts[0]} if texts else {}
    else:
        messages.append(rest)


def _last_assistant(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> dict[str, Any]:
    """The last message if it is the assistant's, else a new one; gets the marks of `item`.

    The first of several marks of a message applies.
    """
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant"})
    messages[-1].update(_marks(item) | _marks(messages[-1]))
    return messages[-1]


def _chat_parts(content: Any) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [_text_part(content)]
    return [_chat_part(part) for part in objects(content)]


def _chat_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    match part.get("type"):
        case "input_text" | "output_text":
            return _text_part(string(part.get("text")))
        case "input_image":
            return _image()
    return part


def _text_part(text: str) -> dict[str, Any]:
    return {"text": text, "type": "text"}


def _image() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": ""}}


def _marks(item: Mapping[str, Any]) -> dict[str, Any]:
    """The marks of the proxy that an item has."""
    return {key: item[key] for key in MESSAGE_FIELDS if item.get(key)}


def _is_function(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") == "function"


def _responses_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {key: tool[key] for key in tool if key != "type"}
    return {"type": "function", "function": {"strict": True} | function}


def _items(value: Any) -> list[Mapping[str, Any]]:
    """The elements of a list; an element that is not an object counts as an empty object."""
    items = value if isinstance(value, list) else []
    return [item if isinstance(item, dict) else {} for item in items]


def objects(value: Any) -> list[Mapping[str, Any]]:
    """The elements of a list that are objects."""
    items = value if isinstance(value, list) else []
    return [item for item in items if isinstance(item, dict)]


def string(value: Any) -> str:
    """A text; empty for another value, as llama-server's `json_value` reads it."""
    return value if isinstance(value, str) else ""
