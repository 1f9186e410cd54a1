"""A request body of any dialect as the one request the engine decides about.

The body is read leniently: what llama-server will refuse is its own to refuse, in its own words.
Only our own fields are checked here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from evoke_proxy.core.model.blocks import Role
from evoke_proxy.core.request import messages
from evoke_proxy.core.request.messages import Message, ToolCall
from evoke_proxy.core.request.options import (
    MESSAGE_FIELDS,
    OURS,
    TOP_LEVEL_FIELDS,
    RequestOptions,
    check_marks,
    marked_in,
    parse_options,
    strip_own_fields,
    whole,
)

__all__ = [
    "MESSAGE_FIELDS",
    "TOP_LEVEL_FIELDS",
    "ChatRequest",
    "Message",
    "RequestOptions",
    "ToolCall",
    "strip_own_fields",
    "parse_chat",
]

# Of each argument of a tool call: what it is about, not all that it writes.
_ARGUMENT_CHARS = 200
_ARGUMENTS = 16

_READERS: dict[str, Callable[[Mapping[str, Any]], Sequence[Message]]] = {
    "chat": messages.from_chat,
    "responses": messages.from_responses,
    "messages": messages.from_anthropic,
    "completions": messages.from_completion,
}
# In the server's order of precedence.
_MAX_TOKENS = ("n_predict", "max_completion_tokens", "max_tokens", "max_output_tokens")
_NOTHING: Mapping[str, int] = {}
_ANTHROPIC_MAX_TOKENS = 4096  # the server's default in that dialect alone


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What the engine needs to know of a request; `max_tokens` is None without a limit.

    `keeps` is what the client marked: "pin" or "prefer", by the index of the message; `keys` are
    those of the body's top level without ours; a `plain` one has neither media nor marks of ours
    in its messages.
    """

    dialect: str
    messages: Sequence[Message]
    max_tokens: int | None
    stream: bool
    n: int
    has_media: bool
    cache_prompt: bool
    tags: RequestOptions
    has_tools: bool = False
    plain: bool = True
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
        """What this turn is about: user and tool text after the last answer, and what that answer
        called tools with: a file is asked for by its path, not by what is in it."""
        said, called = self._latest
        return "\n".join([*map(_arguments, called), *said])

    @property
    def files(self) -> tuple[str, ...]:
        """The paths that the last answer called tools with."""
        return tuple(dict.fromkeys(path for call in self._latest[1] if (path := call.path)))

    @property
    def _latest(self) -> tuple[list[str], tuple[ToolCall, ...]]:
        """The texts after the last answer, and that answer's calls."""
        at = len(self.messages)
        while at and self.messages[at - 1].role is Role.ASSISTANT:  # the client begins the answer
            at -= 1
        said: list[str] = []
        while at and self.messages[at - 1].role is not Role.ASSISTANT:
            at -= 1
            if self.messages[at].role in (Role.USER, Role.TOOL):
                said.append(self.messages[at].text)
        return said[::-1], self.messages[at - 1].tool_calls if at and said else ()


def parse_chat(
    dialect: str,
    body: Mapping[str, Any],
    bench: bool = False,
    known: Mapping[str, int] = _NOTHING,
) -> ChatRequest:
    """A request from its parsed body; RequestError when one of our own fields is wrong.

    `dialect` is chat, responses, messages or completions; KeyError on another. Without `bench` what
    only a bench can mean is refused. `known` says of how many messages of a list, the first, it is
    known that they are `plain`.
    """
    found = _READERS[dialect](body)
    marked = marked_in(body, known)
    check_marks(marked)
    has_media = messages.has_media(body, known)
    given = enumerate(found) if marked else ()
    return ChatRequest(
        dialect=dialect,
        messages=found,
        max_tokens=_max_tokens(body, _ANTHROPIC_MAX_TOKENS if dialect == "messages" else None),
        stream=body.get("stream") is True,
        n=_count(body),
        has_media=has_media,
        cache_prompt=body.get("cache_prompt") is not False,
        tags=parse_options(body, bool(marked), bench),
        has_tools=bool(body.get("tools") or body.get("functions")),
        plain=not (marked or has_media),
        keeps={i: message.keep for i, message in given if message.keep},
        keys=frozenset(body) - OURS,
    )


def _max_tokens(body: Mapping[str, Any], default: int | None) -> int | None:
    given = (whole(body.get(key)) for key in _MAX_TOKENS)
    limit = next((value for value in given if value is not None), default)
    return limit if limit is not None and limit >= 0 else None


def _count(body: Mapping[str, Any]) -> int:
    given = [whole(body.get(key)) or 1 for key in ("n", "n_cmpl")]
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and _is_batch(prompt) else 1
    return max(*given, 1) * prompts


def _is_batch(prompt: list[Any]) -> bool:
    return len(prompt) > 1 and all(isinstance(item, str | list | dict) for item in prompt)


def _arguments(call: ToolCall) -> str:
    """What a call says, without keys and quotes; all of it when it is no JSON."""
    try:
        said = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments[:_ARGUMENT_CHARS]
    return "\n".join(str(value)[:_ARGUMENT_CHARS] for value in islice(_leaves(said), _ARGUMENTS))


def _leaves(value: Any) -> Iterator[str | int | float]:
    """Texts and numbers of a JSON value, however deep."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield value


# A longer prompt is worth remembering, should it be a conversation after all.
MAX_TOKENS = 2048
# A limit up to here is one for a title, a word, a yes or no.
MAX_ANSWER = 64
# The beginnings of a prompt are where a client says what it wants.
_LOOKED_AT = 600
_TASK = re.compile(
    r"\A\s*### Task:"  # every task prompt of Open WebUI
    r"|\btitle generator\b"
    r"|\b(?:generat\w*|writ\w*|creat\w*|come up with)\b[^.\n]{0,60}"
    r"\b(?:title|tags|commit message)\b"
    r"|\bsummar\w+ this (?:coding )?conversation\b",
    re.IGNORECASE,
)


def is_side_request(request: ChatRequest, n_tokens: int, beside: bool, family: bool) -> bool:
    """Whether a request that goes on from no session is to become none.

    `n_tokens` is the length of its prompt; `beside` says that a conversation of the same client is
    alive, `family` that one of them carries the same id. It is a side request when it is the first
    word of whatever it is, brings no tools, and
    either says it wants a title, tags or a summary,
    or is short, sent beside a conversation, and belongs to it by its id or wants a tiny answer.
    """
    roles = {message.role for message in request.messages}
    if request.has_tools or not roles <= {Role.SYSTEM, Role.USER}:
        return False
    if any(_TASK.search(message.text[:_LOOKED_AT]) for message in request.messages):
        return True
    tiny = request.max_tokens is not None and request.max_tokens <= MAX_ANSWER
    return beside and n_tokens <= MAX_TOKENS and (family or tiny)
