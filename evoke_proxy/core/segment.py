"""Cuts a rendered prompt into blocks: along messages, and small enough to be moved one by one."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from evoke_proxy.core.blocks import Role, Span
from evoke_proxy.core.messages import Message, ToolCall
from evoke_proxy.core.rendered import MessageSpan

_PATH_ARGUMENTS = ("path", "file", "filePath", "file_path", "filename")
_TEXT_OVERLAP = 40  # characters: where tokens fall in the text is only known roughly
_MAX_NAME = 100


@dataclass(frozen=True, slots=True)
class Draft:
    """A block before it has a label; the fields are those of `Block`."""

    key: str
    span: Span
    role: Role
    message: int
    text: str
    identity: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Name:
    base: str
    identity: tuple[str, ...]


def cut(
    n_tokens: int,
    spans: Sequence[MessageSpan],
    messages: Sequence[Message],
    generation: int,
    block_tokens: int = 64,
    cuts: Iterable[int] = (),
    start: int = 0,
    numbers: Mapping[str, int] | None = None,
) -> list[Draft]:
    """Blocks of at most `block_tokens` tokens that cover [start, generation) without gaps.

    None crosses the end of a message or a position of `cuts`. `numbers` says for names that blocks
    before `start` have where their numbering goes on. Without spans the prompt is one message.
    A block's text is its share of the message's text by length, with some overlap at both ends.
    """
    end = min(generation, n_tokens)
    given = spans if len(spans) else (MessageSpan(0, Role.USER, Span(0, end)),)
    first = bisect_right(given, start, key=_span_end)
    names = _Names(messages)
    drafts: list[Draft] = []
    edges = sorted(cuts)
    taken = defaultdict(int, numbers or {})
    for item in given[first:]:
        name = names.of(item)
        message = messages[item.index] if 0 <= item.index < len(messages) else Message(item.role)
        for span in _pieces(item.span.clipped(end), start, edges, block_tokens):
            number = taken[name.base]
            taken[name.base] += 1
            text = share(message.shown, item.span, span)
            key = f"{name.base}#{number}"
            drafts.append(Draft(key, span, item.role, item.index, text, name.identity))
    return drafts


def _pieces(span: Span, start: int, cuts: Sequence[int], block_tokens: int) -> Iterator[Span]:
    first = min(max(span.start, start), span.end)
    edges = sorted({first, span.end, *inside(cuts, Span(first, span.end))})
    for begin, stop in zip(edges, edges[1:], strict=False):
        for at in range(begin, stop, block_tokens):
            yield Span(at, min(at + block_tokens, stop))


def inside(edges: Sequence[int], span: Span) -> Sequence[int]:
    """Of these ascending positions those that would split a span."""
    return edges[bisect_right(edges, span.start) : bisect_left(edges, span.end)]


def share(text: str, whole: Span, part: Span) -> str:
    """The piece of a text that belongs to part of its tokens, by length, with some overlap."""
    per_token = len(text) / max(1, len(whole))
    begin = int((part.start - whole.start) * per_token) - _TEXT_OVERLAP
    end = int((part.end - whole.start) * per_token) + 1 + _TEXT_OVERLAP
    return text[max(0, begin) : end]


def next_numbers(keys: Iterable[str], known: Mapping[str, int] | None = None) -> dict[str, int]:
    """The next free number of each name; keys are `name#2`, or `name#2.1` of a split block."""
    numbers = dict(known or {})
    for key in keys:
        base, _, rest = key.rpartition("#")
        numbers[base] = max(numbers.get(base, 0), int(rest.partition(".")[0]) + 1)
    return numbers


class _Names:
    """What the blocks of each message are called; asked for few of many."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages

    def of(self, item: MessageSpan) -> _Name:
        if not 0 <= item.index < len(self._messages):
            return _Name(f"{item.role}:{item.index}", ())
        message = self._messages[item.index]
        call = self._call(message.tool_call_id) if message.role is Role.TOOL else None
        return _name(item.index, message, call)

    def _call(self, id: str) -> ToolCall | None:
        """The latest call with this id."""
        for message in reversed(self._messages) if id else ():
            for call in reversed(message.tool_calls):
                if call.id == id:
                    return call
        return None


def _name(index: int, message: Message, call: ToolCall | None) -> _Name:
    called = [call] if call is not None else list(message.tool_calls)
    identity = [part for item in called for part in _call_identity(item)]
    identity += [message.block_name, message.name, message.tool_call_id]
    base = message.block_name or _base(index, message, call)
    return _Name(base[:_MAX_NAME], tuple(dict.fromkeys(part for part in identity if part)))


def _base(index: int, message: Message, call: ToolCall | None) -> str:
    if message.role is not Role.TOOL:
        return "system" if message.role is Role.SYSTEM and index == 0 else f"{message.role}:{index}"
    path = _path(call) if call is not None else ""
    if path:
        return f"file:{_basename(path)}"
    return f"tool:{(call.name if call is not None else '') or message.name or index}"


def _call_identity(call: ToolCall) -> Iterator[str]:
    path = _path(call)
    if path:
        yield path
        yield _basename(path)
    yield call.name
    yield call.id


def _path(call: ToolCall) -> str:
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(arguments, dict):
        return ""
    given = (arguments.get(key) for key in _PATH_ARGUMENTS)
    return next((value for value in given if isinstance(value, str) and value.strip()), "").strip()


def _span_end(item: MessageSpan) -> int:
    return item.span.end


def _basename(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or path
