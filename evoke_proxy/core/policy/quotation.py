"""Quotes blocks of the conversation in a request, where their text is decoded again.

The text is a part of the forwarded request only. The next turn decodes the complete exchange
again without the quotation, because the client does not send it. Token accounting counts both as
`decoded`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evoke_proxy.core.model.blocks import Block, Role
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.request.json_edit import prepend, replaced
from evoke_proxy.core.request.json_parsing import parsed_json
from evoke_proxy.core.request.transcript import transcript_turns

# For each dialect: the key of the list of items, and the type of a part with text.
_LISTS = {
    "chat": ("messages", "text"),
    "responses": ("input", "input_text"),
    "messages": ("messages", "text"),
}
_ANSWERABLE_ROLES = ("user", "tool", "function")


@dataclass(frozen=True, slots=True)
class QuotedRequest:
    """A request with quoted blocks.

    Attributes:
        body: The changed body.
        request: The parsed request of that body.
        blocks: The quoted blocks.
        is_past: Whether they are of removed messages, see `past_quotes`.
    """

    body: bytes
    request: ChatRequest
    blocks: tuple[Block, ...]
    is_past: bool = False


def with_note(
    request: ChatRequest, body: bytes, note: str, blocks: Sequence[Block]
) -> QuotedRequest | None:
    """Insert a note, which quotes these blocks, into a request; None when there is no place for it.

    It becomes the beginning of the last user message or tool result, which every template renders,
    or of the newest turn of a transcript; never a part of an answer that the client prefills. A
    transcript with other parts beside its text has no place for it.
    """
    insertion, at = _insertion_point(request.dialect, body), _last_answerable(request)
    if insertion is None or at is None:
        return None
    path, part_type = insertion
    if request.transcript:
        place = _transcript_path(body, path, request.messages[at].text)
        if place is None:
            return None
        text = _in_transcript(request, note)
        changed = replaced(body, {place: json.dumps(text)})
    else:
        text = note + request.messages[at].text
        changed = prepend(body, path, note, {"type": part_type, "text": note})
    if changed == body:
        return None
    messages = list(request.messages)
    messages[at] = replace(messages[at], text=text, joints=())
    transcript = transcript_turns(text) if request.transcript else ()
    extended = replace(request, messages=messages, transcript=transcript)
    return QuotedRequest(changed, extended, tuple(blocks))


def _in_transcript(request: ChatRequest, note: str) -> str:
    """Return the text of a transcript with a note before what its newest turn says.

    The lines of the note are indented: one like `user: ...` would be a turn of the transcript.
    """
    text, newest = request.messages[-1].text, request.transcript[-1]
    indented = note.rstrip().replace("\n", "\n  ")
    return f"{text[: newest.text_start]} {indented}\n\n{text[newest.text_start :].lstrip()}"


def _transcript_path(
    body: bytes, path: Sequence[str | int], text: str
) -> tuple[str | int, ...] | None:
    """Return the path of a transcript's text; None when the value at `path` has anything else."""
    value: Any = parsed_json(body)
    for key in path:
        value = value[key]
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        path, value = [*path, 0, "text"], value[0].get("text")
    return tuple(path) if value == text else None


def runs(blocks: Sequence[Block]) -> list[list[Block]]:
    """Group blocks that directly follow each other in the same message."""
    runs: list[list[Block]] = []
    for block in blocks:
        before = runs[-1][-1] if runs else None
        if before and (before.message, before.span.end) == (block.message, block.span.start):
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _last_answerable(request: ChatRequest) -> int | None:
    """Return the index of the last message of a user or a tool; None without one."""
    for at in range(len(request.messages) - 1, -1, -1):
        if request.messages[at].role in (Role.USER, Role.TOOL):
            return at
    return None


def _insertion_point(dialect: str, body: bytes) -> tuple[list[str | int], str] | None:
    """Return where to insert text into the last message of a user or a tool.

    A path in the body, to a text or to a list of parts, and the `type` of a part with text; None
    without such a message.
    """
    key, part_type = _LISTS[dialect]
    items = parsed_json(body).get(key)
    if isinstance(items, str):
        return [key], part_type
    for at in range(len(items) - 1, -1, -1) if isinstance(items, list) else ():
        item = items[at]
        if isinstance(item, dict) and item.get("type") == "function_call_output":
            return [key, at, "output"], part_type
        if isinstance(item, dict) and item.get("role") in _ANSWERABLE_ROLES:
            return [key, at, *_text_path(item, dialect)], part_type
    return None


def _text_path(item: Mapping[str, Any], dialect: str) -> list[str | int]:
    """Return the path of an item's text; in the messages dialect, of its last tool result."""
    content = item.get("content")
    parts = content if dialect == "messages" and isinstance(content, list) else []
    results = [
        i
        for i, part in enumerate(parts)
        if isinstance(part, dict) and part.get("type") == "tool_result"
    ]
    return ["content", results[-1], "content"] if results else ["content"]
