"""A /v1/responses body as the chat that llama-server makes of it, for servers that do not tell.

Its converter is followed step by step (server-chat.cpp, server_chat_convert_responses_to_chatcmpl);
whoever uses this checks the result against the server's own count of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What the converter takes out, or puts elsewhere.
_GONE = ("input", "instructions", "tools", "max_output_tokens", "reasoning")
_SAID = ("input_text", "output_text")


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request; of a body that llama-server refuses it may be anything."""
    messages: list[dict[str, Any]] = []
    if "instructions" in body:
        messages.append({"role": "system", "content": body["instructions"] or ""})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    for item in given if isinstance(given, list) else ():
        if isinstance(item, dict):
            _take(messages, item)
    chat = {key: value for key, value in body.items() if key not in _GONE}
    chat["messages"] = messages
    listed = body.get("tools")
    tools = [_tool(item) for item in _listed(listed) if _is_function(item)]
    reasoning = body.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    chat |= {"tools": tools} if tools else {}
    return chat | ({"reasoning_effort": effort} if effort is not None else {})


def _take(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """One more item: a message of its own, or more of the assistant's last one."""
    kind, content = item.get("type"), item.get("content")
    if item.get("role") in ("user", "system", "developer"):
        rest = {key: item[key] for key in item if key not in ("type", "status")}
        messages.append(rest | {"content": _parts(content)})
    elif item.get("role") == "assistant" and kind == "message":
        message = _assistant(messages)
        message.setdefault("content", []).extend(_parts(content))
    elif kind == "function_call":
        function = {"arguments": item.get("arguments", ""), "name": item.get("name", "")}
        call = {"function": function, "id": item.get("call_id", ""), "type": "function"}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        said = output if isinstance(output, str) else _parts(output)
        result = {"content": said, "role": "tool", "tool_call_id": item.get("call_id", "")}
        messages.append(result)
    elif kind == "reasoning" and isinstance(content, list) and content:
        message = _assistant(messages)
        message.setdefault("content", [])
        first = content[0]
        message["reasoning_content"] = first.get("text", "") if isinstance(first, dict) else ""


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The last message if it is the assistant's, else a new one of its."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"text": content, "type": "text"}]
    parts = [part for part in _listed(content) if isinstance(part, dict)]
    return [
        {"text": part.get("text", ""), "type": "text"} if part.get("type") in _SAID else part
        for part in parts
    ]


def _listed(content: Any) -> list[Any]:
    return content if isinstance(content, list) else []


def _is_function(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "function"


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {key: tool[key] for key in tool if key != "type"}
    return {"type": "function", "function": {"strict": True} | function}
