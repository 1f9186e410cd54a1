"""A tool definition in every dialect, and a prefix that makes any model call the tool."""

from __future__ import annotations

from typing import Any

CITY = {"type": "string", "enum": ["Oslo", "Paris"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "The weather of a city"}
CALL = {"name": "get_weather", "arguments": '{"city":"Oslo"}'}
# The start of a tool call. The model continues it, and the grammar of the tool completes it.
CALL_PREFIX = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "'
QUESTION = "How is the weather in Oslo?"
# A chat whose last message is the result of the call.
RESULT_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": QUESTION},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain and wind"},
]
TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "tools": [{"type": "function", "function": FUNCTION | {"parameters": SCHEMA}}],
        "tool_choice": "required",
    },
    "/v1/responses": {
        "tools": [{"type": "function", **FUNCTION, "parameters": SCHEMA}],
        "tool_choice": "required",
    },
    "/v1/messages": {
        "tools": [FUNCTION | {"input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    },
}
