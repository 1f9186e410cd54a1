"""Chat bodies as they may be asked next: the answer in them, and a message that nobody wrote yet.

Bytes are edited, not serialised again: the template must see the client's own spelling.
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

# Whatever a user will write begins unlike one of these two: a letter, and the white space that
# joins with the line break before it.
PLACEHOLDERS = ("Go on.", "\n\n 7")
# Where in a conversation a snapshot is taken. The history up to a message of the user stays a
# prefix of the next request; one inside a tool loop, or after an answer, may still be rewritten.
USER, STEP = "user", "step"
_NO_GENERATION = {"add_generation_prompt": b"false"}


def boundary(body: bytes) -> bytes:
    """The request as mere history: nothing of the answer is begun."""
    return edit_top_level(body, _NO_GENERATION, ())


def continued(body: bytes, messages: Sequence[Mapping[str, Any]]) -> bytes:
    """The history with these messages behind it; unchanged without a list of messages."""
    text = json_text(boundary(body))
    members = [place for place in JsonScanner(text).document() if place.key == "messages"]
    if not members or text[members[-1].value] != "[":
        return text.encode()
    at = members[-1].end - 1
    filled = bool(JsonScanner(text).elements(members[-1].value))
    added = ",".join(json.dumps(message, ensure_ascii=False) for message in messages)
    return (text[:at] + ("," if filled and added else "") + added + text[at:]).encode()


def next_turns(body: bytes, answer: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Two histories that go on from an answer with different words of the user.

    What their renderings share is what the next turn begins with, whatever it says.
    """
    first, second = (
        continued(body, [answer, {"role": "user", "content": text}]) for text in PLACEHOLDERS
    )
    return first, second


def snapshot_obstacle(request: ChatRequest) -> str:
    """Why the slot of a chat request is not kept; empty when it is.

    One that wants its last message continued, or says itself how its prompt ends, has no boundary;
    adapters of its own make its state nobody else's.
    """
    begun = bool(request.messages) and request.messages[-1].role is Role.ASSISTANT
    own = {"add_generation_prompt", "continue_final_message", "prefill_assistant"}
    reasons = (
        ("dialect", request.dialect not in ("chat", "messages", "responses")),
        ("continues", begun or not own.isdisjoint(request.keys)),
        ("lora", "lora" in request.keys),
    )
    return next((reason for reason, holds in reasons if holds), request.bypass)


def kind_of(request: ChatRequest) -> str:
    """Which boundary a request ends at."""
    said = bool(request.messages) and request.messages[-1].role is Role.USER
    return USER if said else STEP


@dataclass(frozen=True, slots=True)
class Stability:
    """What of a template's rendering stays a prefix of the next turn's.

    `boundary`: a history that ends with the user's message; `ahead`: one up to where the next
    message of the user begins. With tools some templates do otherwise.
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


def probes(tools: bool) -> list[bytes]:
    """Bodies whose renderings, in this order, `stability` wants."""
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
    """What the renderings of `probes` say about a template."""
    history, later, first, second, latest = texts
    shared = len(commonprefix([first, second]))
    ahead = latest.startswith(first[:shared]) and shared > len(history)
    return Stability(boundary=later.startswith(history), ahead=ahead)
