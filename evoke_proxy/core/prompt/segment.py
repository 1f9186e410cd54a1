"""Cuts a rendered prompt into blocks: along messages, and small enough to be moved one by one."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from evoke_proxy.core.model.block_table import Positions
from evoke_proxy.core.model.blocks import Role, Span
from evoke_proxy.core.prompt.rendered import MessageSpan
from evoke_proxy.core.request.messages import Message, ToolCall

_TEXT_OVERLAP = 40  # characters: where tokens fall in the text is only known roughly
_MAX_NAME = 100
_MOST_MAPS = 64
# What is between a sentence or a line and the next, as server_blocks_text::stops has it.
_GAP = re.compile(
    r"(?:(?<=[.!?;])[ \t\r\n]+|(?<=[。！？])[ \t\r\n]*"  # noqa: RUF001
    r"|(?<![ \t\r\n])[ \t\r]*\n[ \t\r\n]*)(?=[^ \t\r\n])"
)


@dataclass(frozen=True, slots=True)
class Draft:
    """A block before it has a label; the fields are those of `Block`."""

    display_name: str
    span: Span
    role: Role
    message: int
    text: str
    aliases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Name:
    base: str
    aliases: tuple[str, ...]


def cut(
    n_tokens: int,
    spans: Sequence[MessageSpan],
    messages: Sequence[Message],
    generation: int,
    block_tokens: int = 64,
    cuts: Iterable[int] = (),
    start: int = 0,
    numbers: Mapping[str, int] | None = None,
    stops: Sequence[int] | Positions = (),
) -> list[Draft]:
    """Blocks of at most `block_tokens` tokens that cover [start, generation) without gaps.

    None crosses the end of a message or a position of `cuts`. They end, if they can, at one of
    `stops`, ascending positions where a sentence or a line begins. `numbers` says for names that
    blocks before `start` have where their numbering goes on. Without spans the prompt is one
    message. What a block's text is: see `Shares`.
    """
    end = min(generation, n_tokens)
    given = spans if len(spans) else (MessageSpan(0, Role.USER, Span(0, end)),)
    first = bisect_right(given, start, key=_span_end)
    names = _Names(messages)
    drafts: list[Draft] = []
    edges = sorted(cuts)
    taken, before = dict[str, int](), numbers or {}
    for item in given[first:]:
        name = names.of(item)
        message = messages[item.index] if 0 <= item.index < len(messages) else Message(item.role)
        shares = Shares(message.shown, item.span, stops)
        for span in _pieces(item.span.clipped(end), start, edges, block_tokens, shares.stops):
            number = taken.get(name.base, before.get(name.base, 0))
            taken[name.base] = number + 1
            key = f"{name.base}#{number}"
            drafts.append(Draft(key, span, item.role, item.index, shares.of(span), name.aliases))
    return drafts


def _pieces(
    span: Span, start: int, cuts: Sequence[int], block_tokens: int, stops: Sequence[int]
) -> Iterator[Span]:
    first = min(max(span.start, start), span.end)
    edges = sorted({first, span.end, *inside(cuts, Span(first, span.end))})
    for at, stop in zip(edges, edges[1:], strict=False):
        while stop - at > block_tokens:
            end = _whole(at, block_tokens, stops)
            yield Span(at, end)
            at = end
        if stop > at:
            yield Span(at, stop)


def _whole(at: int, block_tokens: int, stops: Sequence[int]) -> int:
    """Where the block that begins at a position ends: with its last sentence, unless that would
    halve it."""
    last = bisect_right(stops, at + block_tokens) - 1
    found = stops[last] if last >= 0 else 0
    return int(found) if found > at + block_tokens // 2 else at + block_tokens


def inside(edges: Sequence[int], span: Span) -> Sequence[int]:
    """Of these ascending positions those that would split a span."""
    return edges[bisect_right(edges, span.start) : bisect_left(edges, span.end)]


class Shares:
    """What each part of a message's tokens says; `stops` are the positions where a sentence or a
    line begins behind the first, as llama-server sees them.

    Where the message's text has as many, its parts begin and end exactly there. Between two of
    them, or if it has not, a part is known by its length, with some overlap at both ends.
    """

    def __init__(self, text: str, whole: Span, stops: Sequence[int] | Positions = ()) -> None:
        first, end = bisect_right(stops, whole.start), bisect_left(stops, whole.end)
        self.stops = [int(at) for at in stops[first:end]]
        gaps = _GAP.finditer(text) if self.stops else ()
        begins = [gap.end() for gap in gaps if gap.start() > 0]
        known = self.stops if len(begins) == len(self.stops) else []
        self._text = text
        self._edges = [whole.start, *known, max(whole.end, whole.start + 1)]
        self._begins = [0, *begins[: len(known)], len(text)]

    def of(self, part: Span) -> str:
        """The text of these tokens."""
        (begin, before), (end, behind) = self._at(part.start), self._at(part.end)
        return self._text[max(0, begin - before) : end + behind]

    def _at(self, position: int) -> tuple[int, int]:
        """Where in the text a position is, and how many characters on that may be wrong."""
        i = max(0, bisect_right(self._edges, position, hi=len(self._edges) - 1) - 1)
        begin, edge = self._begins[i], self._edges[i]
        if position == edge and i:
            return begin, 0
        per_token = (self._begins[i + 1] - begin) / (self._edges[i + 1] - edge)
        return begin + int((position - edge) * per_token), _TEXT_OVERLAP


def next_numbers(keys: Iterable[str], known: Mapping[str, int] | None = None) -> Mapping[str, int]:
    """The next free number of each name; keys are `name#2`, or `name#2.1` of a split block."""
    before = [dict(known or {})] if not isinstance(known, ChainMap) else known.maps
    if len(before) > _MOST_MAPS:  # else every name would be copied in every turn
        before = [dict(ChainMap(*before))]
    numbers = ChainMap[str, int]({}, *before)
    for key in keys:
        base, _, rest = key.rpartition("#")
        numbers[base] = max(numbers.get(base, 0), int(rest.partition(".")[0]) + 1)
    return numbers


class _Names:
    """What the blocks of each message are called; asked for few of many."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        # Calls by their id, of the messages from this index on.
        self._calls: dict[str, ToolCall] = {}
        self._read_from = len(messages)

    def of(self, item: MessageSpan) -> _Name:
        if not 0 <= item.index < len(self._messages):
            return _Name(f"{item.role}:{item.index}", ())
        message = self._messages[item.index]
        call = self._call(message.tool_call_id) if message.role is Role.TOOL else None
        return _name(item.index, message, call)

    def _call(self, id: str) -> ToolCall | None:
        """The latest call with this id."""
        while id and id not in self._calls and self._read_from:
            self._read_from -= 1
            for call in reversed(self._messages[self._read_from].tool_calls):
                self._calls.setdefault(call.id, call)
        return self._calls.get(id) if id else None


def _name(index: int, message: Message, call: ToolCall | None) -> _Name:
    called = [call] if call is not None else list(message.tool_calls)
    identity = [part for item in called for part in _call_identity(item)]
    identity += [message.block_name, message.name, message.tool_call_id]
    base = message.block_name or _base(index, message, call)
    return _Name(base[:_MAX_NAME], tuple(dict.fromkeys(part for part in identity if part)))


def _base(index: int, message: Message, call: ToolCall | None) -> str:
    if message.role is not Role.TOOL:
        return "system" if message.role is Role.SYSTEM and index == 0 else f"{message.role}:{index}"
    path = call.path if call is not None else ""
    if path:
        return f"file:{_basename(path)}"
    return f"tool:{(call.name if call is not None else '') or message.name or index}"


def _call_identity(call: ToolCall) -> Iterator[str]:
    if path := call.path:
        yield path
        yield _basename(path)
    yield call.name
    yield call.id


def _span_end(item: MessageSpan) -> int:
    return item.span.end


def _basename(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or path
