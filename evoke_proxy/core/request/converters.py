"""Converts bodies of other dialects to chat completions, for servers that render only chats.

The functions follow llama-server's own converters step by step (server-chat.cpp:
server_chat_convert_anthropic_to_oai and server_chat_convert_responses_to_chatcmpl). Callers verify
the result by comparing its number of tokens with the server's count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_BILLING = "x-anthropic-billing-header:"
_STAMP_CHARS = 5  # characters after cch=, which change with every request
_COPIED_KEYS = ("temperature", "top_p", "top_k", "stream", "chat_template_kwargs")


def anthropic_to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert to a chat body; the result is arbitrary for a body that llama-server refuses."""
    chat: dict[str, Any] = {"messages": list(_anthropic_messages(body))}
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


def _anthropic_messages(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    system = body.get("system")
    if system is not None:
        yield {"role": "system", "content": _anthropic_system(system)}
    items = body.get("messages")
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, dict):
            continue
        content = item.get("content")
        if isinstance(content, list):
            yield from _anthropic_blocks(item.get("role", ""), content)
        elif "content" in item or item.get("role") != "assistant":
            yield item


def _anthropic_system(system: Any) -> str:
    if isinstance(system, str):
        return _unstamped(system)
    blocks = system if isinstance(system, list) else ()
    return "".join(_unstamped(str(block.get("text", ""))) for block in blocks if _is(block, "text"))


def _unstamped(text: str) -> str:
    """Mask the part of Claude Code's billing line that changes with every request."""
    at = text.find("cch=", len(_BILLING)) + len("cch=")
    stamped = text.startswith(_BILLING) and at >= len("cch=")
    if not stamped or text[at + _STAMP_CHARS : at + _STAMP_CHARS + 1] != ";":
        return text
    return text[:at] + "f" * _STAMP_CHARS + text[at + _STAMP_CHARS :]


def _anthropic_blocks(role: Any, blocks: list[Any]) -> Iterator[Mapping[str, Any]]:
    """Convert a message of blocks: text and tool calls, then one message for each result."""
    texts = [block for block in blocks if _is(block, "text")]
    reasoning = "".join(str(b.get("thinking", "")) for b in blocks if _is(b, "thinking"))
    calls = [_anthropic_call(block) for block in blocks if _is(block, "tool_use")]
    if texts or calls or reasoning:
        message: dict[str, Any] = {"role": role, "content": texts or ""}
        message |= {"tool_calls": calls} if calls else {}
        yield message | ({"reasoning_content": reasoning} if reasoning else {})
    for block in blocks:
        if _is(block, "tool_result"):
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id", "")}
            yield result | {"content": _anthropic_result(block.get("content"))}


def _anthropic_result(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "".join(str(part.get("text", "")) for part in parts if _is(part, "text"))


def _anthropic_call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(block.get("input", {}), separators=(",", ":"), ensure_ascii=False)
    function = {"name": block.get("name", ""), "arguments": arguments}
    return {"id": block.get("id", ""), "type": "function", "function": function}


def _anthropic_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool.get("name", ""),
        "description": tool.get("description", ""),
        "parameters": tool.get("input_schema", {}),
    }
    return {"type": "function", "function": function}


def _is(block: Any, kind: str) -> bool:
    return isinstance(block, dict) and block.get("type") == kind


# Members that the converter removes or moves.
_CONVERTED = ("input", "instructions", "tools", "max_output_tokens", "reasoning")
_TEXT_PARTS = ("input_text", "output_text")


def responses_to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Convert to a chat body; the result is arbitrary for a body that llama-server refuses."""
    messages: list[dict[str, Any]] = []
    if "instructions" in body:
        messages.append({"role": "system", "content": body["instructions"] or ""})
    items = body.get("input")
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict):
            _add_item(messages, item)
    chat = {key: value for key, value in body.items() if key not in _CONVERTED}
    chat["messages"] = messages
    listed = body.get("tools")
    tools = [_responses_tool(item) for item in _list(listed) if _is_function(item)]
    reasoning = body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    chat |= {"tools": tools} if tools else {}
    return chat | ({"reasoning_effort": effort} if effort is not None else {})


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Add an item as a new message, or to the last message of the assistant."""
    kind, content = item.get("type"), item.get("content")
    if item.get("role") in ("user", "system", "developer"):
        rest = {key: item[key] for key in item if key not in ("type", "status")}
        messages.append(rest | {"content": _chat_parts(content)})
    elif item.get("role") == "assistant" and kind == "message":
        message = _last_assistant(messages)
        message.setdefault("content", []).extend(_chat_parts(content))
    elif kind == "function_call":
        function = {"arguments": item.get("arguments", ""), "name": item.get("name", "")}
        call = {"function": function, "id": item.get("call_id", ""), "type": "function"}
        _last_assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        content = output if isinstance(output, str) else _chat_parts(output)
        result = {"content": content, "role": "tool", "tool_call_id": item.get("call_id", "")}
        messages.append(result)
    elif kind == "reasoning" and isinstance(content, list) and content:
        message = _last_assistant(messages)
        message.setdefault("content", [])
        first = content[0]
        message["reasoning_content"] = first.get("text", "") if isinstance(first, dict) else ""


def _last_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The last message if it is the assistant's, else a new one."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _chat_parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"text": content, "type": "text"}]
    parts = [part for part in _list(content) if isinstance(part, dict)]
    return [
        {"text": part.get("text", ""), "type": "text"} if part.get("type") in _TEXT_PARTS else part
        for part in parts
    ]


def _list(content: Any) -> list[Any]:
    return content if isinstance(content, list) else []


def _is_function(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "function"


def _responses_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {key: tool[key] for key in tool if key != "type"}
    return {"type": "function", "function": {"strict": True} | function}
