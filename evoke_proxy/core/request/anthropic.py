"""A /v1/messages body as the chat that llama-server makes of it, for servers that do not tell.

Its converter is followed step by step (server-chat.cpp, server_chat_convert_anthropic_to_oai);
whoever uses this checks the result against the server's own count of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_BILLING = "x-anthropic-billing-header:"
_STAMP = 5  # characters behind cch= that change with every request
_PASSED = ("temperature", "top_p", "top_k", "stream", "chat_template_kwargs")


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request; of a body that llama-server refuses it may be anything."""
    chat: dict[str, Any] = {"messages": list(_messages(body))}
    tools = body.get("tools")
    if isinstance(tools, list):
        chat["tools"] = [_tool(item) for item in tools if isinstance(item, dict)]
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") in ("auto", "any", "tool"):
        chat["tool_choice"] = "auto" if choice["type"] == "auto" else "required"
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        chat["thinking_budget_tokens"] = thinking.get("budget_tokens", 10000)
    return chat | {key: body[key] for key in _PASSED if key in body}


def _messages(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    system = body.get("system")
    if system is not None:
        yield {"role": "system", "content": _system(system)}
    given = body.get("messages")
    for item in given if isinstance(given, list) else ():
        if not isinstance(item, dict):
            continue
        content = item.get("content")
        if isinstance(content, list):
            yield from _converted(item.get("role", ""), content)
        elif "content" in item or item.get("role") != "assistant":
            yield item


def _system(system: Any) -> str:
    if isinstance(system, str):
        return _unstamped(system)
    blocks = system if isinstance(system, list) else ()
    return "".join(_unstamped(str(block.get("text", ""))) for block in blocks if _is(block, "text"))


def _unstamped(text: str) -> str:
    """Without the mark of Claude Code's billing line that changes with every request."""
    at = text.find("cch=", len(_BILLING)) + len("cch=")
    known = text.startswith(_BILLING) and at >= len("cch=")
    if not known or text[at + _STAMP : at + _STAMP + 1] != ";":
        return text
    return text[:at] + "f" * _STAMP + text[at + _STAMP :]


def _converted(role: Any, blocks: list[Any]) -> Iterator[Mapping[str, Any]]:
    """A message of blocks: what is said and called, then a message for each result."""
    texts = [block for block in blocks if _is(block, "text")]
    thought = "".join(str(b.get("thinking", "")) for b in blocks if _is(b, "thinking"))
    calls = [_call(block) for block in blocks if _is(block, "tool_use")]
    if texts or calls or thought:
        message: dict[str, Any] = {"role": role, "content": texts or ""}
        message |= {"tool_calls": calls} if calls else {}
        yield message | ({"reasoning_content": thought} if thought else {})
    for block in blocks:
        if _is(block, "tool_result"):
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id", "")}
            yield result | {"content": _result(block.get("content"))}


def _result(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "".join(str(part.get("text", "")) for part in parts if _is(part, "text"))


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    given = block.get("input", {})
    arguments = json.dumps(given, separators=(",", ":"), ensure_ascii=False)
    function = {"name": block.get("name", ""), "arguments": arguments}
    return {"id": block.get("id", ""), "type": "function", "function": function}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool.get("name", ""),
        "description": tool.get("description", ""),
        "parameters": tool.get("input_schema", {}),
    }
    return {"type": "function", "function": function}


def _is(block: Any, kind: str) -> bool:
    return isinstance(block, dict) and block.get("type") == kind
