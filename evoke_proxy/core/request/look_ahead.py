"""Makes bodies of possible next requests, whose common prefix is decoded ahead of time.

The body is edited in place, because the template must see the client's spelling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from posixpath import commonprefix
from typing import Any

from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.request.json_edit import JsonScanner, edit_top_level
from evoke_proxy.core.request.json_parsing import json_text

# Two dissimilar user messages: the prefix that their renderings share is safe to decode ahead. One
# begins with a letter, the other with white space that merges with the line break before it.
PLACEHOLDERS = ("Go on.", "\n\n 7")
# Kinds of boundaries at which a snapshot is taken. The history up to a message of the user stays a
# prefix of the next request. A template may rewrite the history inside a tool loop or after an
# answer. Other conversations may begin with a prefix, and with a whole history: a step without
# missing rows of a patched server.
KINDS = (USER, STEP, PREFIX, WHOLE) = "user", "step", "prefix", "whole"
_NO_GENERATION = {"add_generation_prompt": b"false"}


def boundary(body: bytes) -> bytes:
    """The request without a generation prompt, which renders the history alone."""
    return edit_top_level(body, _NO_GENERATION, ())


def continued(body: bytes, messages: Sequence[Mapping[str, Any]]) -> bytes:
    """The history followed by these messages; unchanged without a list of messages."""
    text = json_text(boundary(body))
    members = [member for member in JsonScanner(text).document() if member.key == "messages"]
    if not members or text[members[-1].value] != "[":
        return text.encode()
    at = members[-1].end - 1
    filled = bool(JsonScanner(text).elements(members[-1].value))
    added = ",".join(json.dumps(message, ensure_ascii=False) for message in messages)
    return (text[:at] + ("," if filled and added else "") + added + text[at:]).encode()


def next_turns(body: bytes, answer: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Two histories that continue an answer with different user messages.

    The next turn begins with the common prefix of their renderings, whatever the user writes.
    """
    first, second = (
        continued(body, [answer, {"role": "user", "content": text}]) for text in PLACEHOLDERS
    )
    return first, second


def openings(body: bytes) -> tuple[bytes, ...]:
    """Two requests that end with different messages in place of the first one of the user.

    Another conversation that begins alike has the common prefix of their renderings, whatever its
    user writes. Returns none for a request without a message of the user.
    """
    text = json_text(boundary(body))
    members = [member for member in JsonScanner(text).document() if member.key == "messages"]
    if not members or text[members[-1].value] != "[":
        return ()
    for span in JsonScanner(text).elements(members[-1].value):
        message = json.loads(text[span.value : span.end])
        if isinstance(message, dict) and message.get("role") == "user":
            before, behind = text[: span.start], text[members[-1].end - 1 :]
            return tuple(
                f"{before}{json.dumps({'role': 'user', 'content': content})}{behind}".encode()
                for content in PLACEHOLDERS
            )
    return ()


def snapshot_obstacle(request: ChatRequest) -> str:
    """Why no snapshot is made of a chat request; empty when one can be made.

    A request that continues its last message, or sets the end of its prompt, has no boundary.
    Other requests cannot use a state that was computed with a request's own adapters.
    """
    prefilled = bool(request.messages) and request.messages[-1].role is Role.ASSISTANT
    continuation_keys = {"add_generation_prompt", "continue_final_message", "prefill_assistant"}
    reasons = (
        ("dialect", request.dialect not in ("chat", "messages", "responses")),
        ("continues", prefilled or not continuation_keys.isdisjoint(request.keys)),
        ("lora", "lora" in request.keys),
    )
    return next((reason for reason, holds in reasons if holds), request.bypass())


def kind_of(request: ChatRequest) -> str:
    """The kind of boundary at which a request ends: USER or STEP."""
    from_user = bool(request.messages) and request.messages[-1].role is Role.USER
    return USER if from_user else STEP


@dataclass(frozen=True, slots=True)
class Stability:
    """Which renderings of a template stay prefixes of the next turn's rendering.

    Attributes:
        boundary: a history that ends with the user's message.
        ahead: a history up to the start of the user's next message.
    """

    boundary: bool
    ahead: bool


_HISTORY = (
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4.", "reasoning_content": "Two and two."},
)
_NEXT = (
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "It is 6.", "reasoning_content": "Three and three."},
    {"role": "user", "content": "Thanks."},
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def probe_bodies(tools: bool) -> list[bytes]:
    """Bodies whose renderings `stability` compares, in its order."""
    body: dict[str, Any] = {"messages": []} | ({"tools": [_TOOL]} if tools else {})
    empty = json.dumps(body).encode()
    first, second = ({"role": "user", "content": text} for text in PLACEHOLDERS)
    histories = (
        _HISTORY[:1],
        (*_HISTORY, *_NEXT[:1]),
        (*_HISTORY, first),
        (*_HISTORY, second),
        (*_HISTORY, *_NEXT),
    )
    return [continued(empty, messages) for messages in histories]


def stability(texts: Sequence[str]) -> Stability:
    """The stability of a template, from its renderings of `probe_bodies`."""
    history, later, first, second, latest = texts
    shared = len(commonprefix([first, second]))
    ahead = latest.startswith(first[:shared]) and shared > len(history)
    return Stability(boundary=later.startswith(history), ahead=ahead)
