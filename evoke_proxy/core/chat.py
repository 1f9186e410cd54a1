"""A request body of any dialect as the one request the engine decides about.

The body is read leniently: what llama-server will refuse is its own to refuse, in its own words.
Only our own fields are checked here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from evoke_proxy.config import POLICIES, RECOVERIES
from evoke_proxy.core import messages
from evoke_proxy.core.blocks import Role
from evoke_proxy.core.messages import Message, ToolCall
from evoke_proxy.core.splice import edit_top_level
from evoke_proxy.core.truncate import truncate_messages
from evoke_proxy.errors import RequestError

__all__ = [
    "MESSAGE_FIELDS",
    "TOP_LEVEL_FIELDS",
    "ChatRequest",
    "Message",
    "Tags",
    "ToolCall",
    "freed",
    "parse_chat",
    "truncate_messages",
]

# To be removed from the bytes before they are forwarded: llama-server would refuse or misread them.
TOP_LEVEL_FIELDS = (
    "evoke",
    "evoke_budget",
    "evoke_policy",
    "evoke_recovery",
    "evoke_priority",
    "evoke_pinned",
    "evoke_task_boundary",
    "evoke_session",
)
MESSAGE_FIELDS = ("evoke_keep", "evoke_name")
_OURS = frozenset(TOP_LEVEL_FIELDS)

_KEEPS = ("pin", "prefer")
_SESSION = re.compile(r"[A-Za-z0-9._:@/+=-]{1,256}")
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,100}")
_MAX_PRIORITY = 100.0

_READERS: dict[str, Callable[[Mapping[str, Any]], Sequence[Message]]] = {
    "chat": messages.from_chat,
    "responses": messages.from_responses,
    "messages": messages.from_anthropic,
    "completions": messages.from_completion,
}
# In the server's order of precedence.
_MAX_TOKENS = ("n_predict", "max_completion_tokens", "max_tokens", "max_output_tokens")
_ANTHROPIC_MAX_TOKENS = 4096  # the server's default in that dialect alone


@dataclass(frozen=True, slots=True)
class Tags:
    """Our own top-level fields; None and the defaults mean "as configured"."""

    enabled: bool = True
    budget: int | None = None
    policy: str | None = None
    recovery: str | None = None
    priority: float = 1.0
    pinned: bool = False
    task_boundary: bool = False
    session: str | None = None
    given: bool = False


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What the engine needs to know of a request; `max_tokens` is None without a limit.

    `keeps` is what the client marked: "pin" or "prefer", by the index of the message; `keys` are
    those of the body's top level without ours.
    """

    dialect: str
    messages: Sequence[Message]
    max_tokens: int | None
    stream: bool
    n: int
    has_media: bool
    cache_prompt: bool
    tags: Tags
    has_tools: bool = False
    keeps: Mapping[int, str] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()

    @property
    def bypass(self) -> str:
        """Why the budget cannot manage this request; empty when it can."""
        reasons = (
            ("disabled", not self.tags.enabled),
            ("raw_prompt", self.dialect == "completions"),
            ("n", self.n > 1),
            ("media", self.has_media),
            ("cache_prompt", not self.cache_prompt),
        )
        return next((reason for reason, holds in reasons if holds), "")

    @property
    def query(self) -> str:
        """What this turn is about: user and tool text after the last answer."""
        at = len(self.messages)
        while at and self.messages[at - 1].role is Role.ASSISTANT:  # the client begins the answer
            at -= 1
        said: list[str] = []
        while at and self.messages[at - 1].role is not Role.ASSISTANT:
            at -= 1
            if self.messages[at].role in (Role.USER, Role.TOOL):
                said.append(self.messages[at].text)
        return "\n".join(reversed(said))


def parse_chat(dialect: str, body: Mapping[str, Any]) -> ChatRequest:
    """A request from its parsed body; RequestError when one of our own fields is wrong.

    `dialect` is chat, responses, messages or completions; KeyError on another.
    """
    found = _READERS[dialect](body)
    marked = _marked(body)
    _check_marks(marked)
    given = enumerate(found) if marked else ()
    return ChatRequest(
        dialect=dialect,
        messages=found,
        max_tokens=_max_tokens(body, _ANTHROPIC_MAX_TOKENS if dialect == "messages" else None),
        stream=body.get("stream") is True,
        n=_count(body),
        has_media=messages.has_media(body),
        cache_prompt=body.get("cache_prompt") is not False,
        tags=_tags(body, bool(marked)),
        has_tools=bool(body.get("tools") or body.get("functions")),
        keeps={i: message.keep for i, message in given if message.keep},
        keys=frozenset(body) - _OURS,
    )


def _max_tokens(body: Mapping[str, Any], default: int | None) -> int | None:
    given = (_whole(body.get(key)) for key in _MAX_TOKENS)
    limit = next((value for value in given if value is not None), default)
    return limit if limit is not None and limit >= 0 else None


def _count(body: Mapping[str, Any]) -> int:
    given = [_whole(body.get(key)) or 1 for key in ("n", "n_cmpl")]
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and _is_batch(prompt) else 1
    return max(*given, 1) * prompts


def _is_batch(prompt: list[Any]) -> bool:
    return len(prompt) > 1 and all(isinstance(item, str | list | dict) for item in prompt)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def freed(body: bytes, parsed: Mapping[str, Any]) -> bytes:
    """A body's bytes without our own fields, all others as they were; `parsed` is what it says."""
    of_messages = MESSAGE_FIELDS if _marked(parsed) else ()
    return edit_top_level(body, {}, TOP_LEVEL_FIELDS, of_messages, keys=parsed.keys())


def _tags(body: Mapping[str, Any], marked: bool) -> Tags:
    return Tags(
        enabled=_flag(body, "evoke", True),
        budget=_budget(body),
        policy=_one_of(body, "evoke_policy", POLICIES),
        recovery=_one_of(body, "evoke_recovery", RECOVERIES),
        priority=_priority(body),
        pinned=_flag(body, "evoke_pinned", False),
        task_boundary=_flag(body, "evoke_task_boundary", False),
        session=_session(body),
        given=marked or any(key in body for key in TOP_LEVEL_FIELDS),
    )


def _flag(body: Mapping[str, Any], key: str, default: bool) -> bool:
    value = body.get(key, default)
    return value if isinstance(value, bool) else _refuse(key, "true or false", value)


def _budget(body: Mapping[str, Any]) -> int | None:
    value = body.get("evoke_budget")
    if value is None:
        return None
    budget = _whole(value)
    if budget is None or budget <= 0:
        _refuse("evoke_budget", "a whole number of tokens above 0", value)
    return budget


def _one_of(body: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str | None:
    value = body.get(key)
    if value is None or value in known:
        return value
    _refuse(key, f"one of {', '.join(known)}", value)


def _priority(body: Mapping[str, Any]) -> float:
    value = body.get("evoke_priority", 1.0)
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    if usable and math.isfinite(value) and 0 <= value <= _MAX_PRIORITY:
        return float(value)
    _refuse("evoke_priority", f"a number from 0 to {_MAX_PRIORITY:.0f}", value)


def _session(body: Mapping[str, Any]) -> str | None:
    value = body.get("evoke_session")
    if value is None or (isinstance(value, str) and _SESSION.fullmatch(value)):
        return value
    _refuse("evoke_session", "1 to 256 of A-Z a-z 0-9 . _ : @ / + = -", value)


def _marked(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    # Every message of a long conversation is looked at: no call for each.
    keep, name = MESSAGE_FIELDS
    lists = [body.get(key) for key in ("messages", "input")]
    return [
        item
        for given in lists
        if isinstance(given, list)
        for item in given
        if isinstance(item, dict) and (keep in item or name in item)
    ]


def _check_marks(marked: Iterable[Mapping[str, Any]]) -> None:
    for item in marked:
        keep, name = item.get("evoke_keep"), item.get("evoke_name")
        if keep is not None and keep not in _KEEPS:
            _refuse("evoke_keep", "pin or prefer", keep)
        if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
            _refuse("evoke_name", "1 to 100 characters without control characters", name)


def _refuse(field: str, wanted: str, value: object) -> NoReturn:
    raise RequestError(f"{field} must be {wanted}, not {value!r:.100}", f"{field}_invalid")
