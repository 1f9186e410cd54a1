"""Cuts a rendered prompt into named blocks along messages and sentences."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

from evoke_proxy.core.model.block_table import Positions
from evoke_proxy.core.model.blocks import Role, Span, clipped
from evoke_proxy.core.prompt.rendered import MessageSpan, Rendered
from evoke_proxy.core.request.client_text import (
    elements_of,
    has_only_additions,
    is_result,
    without_reminders,
)
from evoke_proxy.core.request.messages import Message, ToolCall

# Characters that are added to a part at an end whose position in the text is an estimate.
_TEXT_OVERLAP = 40
# Longer names of blocks are truncated to this many characters.
_MAX_NAME = 100
# Each block of a message has its other names: longer ones, and those of further tool calls, are
# left out.
_MAX_ALIAS, _MAX_CALLS = 1000, 32
# Characters of text that a token, and a block at least, can have. Only a message with text that
# the template leaves out, or with images, has more; each of its blocks would have all of it.
_TOKEN_CHARS, _BLOCK_CHARS = 128, 4096
# What a client has added with fewer tokens is a part of the blocks around it.
_MIN_ADDED = 16
# Of so many contents of files with rules for agents in one message, the names are known.
_MAX_RULES = 8
# A chain of more maps than this is merged into one map.
_MAX_MAPS = 16
# The gap between two sentences or lines: white space behind the end of a sentence, a line break and
# the white space behind it, or nothing behind a full stop that needs no space.
_GAP = re.compile(
    r"(?<=[.!?;。！？])[ \t\r\n]+|\n[ \t\r\n]*|(?<=[。！？])(?=[^ \t\r\n])"  # noqa: RUF001
)
_SPACES = " \t\r\n"
_WHITE_SPACE = re.compile(rf"[{_SPACES}]+")
# A search of this many characters keeps the interpreter's lock for less than a millisecond.
_SEARCHED_CHARS = 8192


@dataclass(frozen=True, slots=True)
class Draft:
    """A block that has no label yet; its fields are those of `Block`."""

    display_name: str
    span: Span
    role: Role
    message: int
    text: str
    aliases: tuple[str, ...]
    is_reminder: bool = False
    is_added: bool = False
    is_result: bool = False


@dataclass(frozen=True, slots=True)
class CutOptions:
    """How a prompt is cut.

    Attributes:
        block_tokens: maximum number of tokens of a block.
        boundaries: positions that no block may cross.
        start: position of the first block; earlier positions have blocks already.
        next_numbers: next number of each name that blocks before `start` use.
    """

    block_tokens: int = 64
    boundaries: Collection[int] = ()
    start: int = 0
    next_numbers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Name:
    """Names of the blocks of one message: their display name without its number, and aliases."""

    base: str
    aliases: tuple[str, ...]


def cut(
    rendered: Rendered, messages: Sequence[Message], options: CutOptions | None = None
) -> list[Draft]:
    """Cut [start, generation) of a prompt into blocks that leave no gap.

    No block crosses the end of a message or a boundary, nor the end of what a client has added to a
    message in lines of its own. A block ends with a sentence or line when this leaves more than
    half of its maximum length. A prompt without spans is cut as one message.
    The text of a block is an estimate, see `TextAlignment`. An image or a sound is one block of any
    length, with the beginning of the text of its message.
    """
    options = options or CutOptions()
    end = min(rendered.generation, len(rendered.tokens))
    whole = () if rendered.turn_spans else (MessageSpan(0, Role.USER, Span(0, end)),)
    names = _Names(messages)
    drafts: list[Draft] = []
    numbers = dict[str, int]()
    boundaries = sorted(at for at in options.boundaries if at > options.start)
    for item in whole or rendered.spans_after(options.start):
        name = names.of(item)
        message = messages[item.index] if 0 <= item.index < len(messages) else Message(item.role)
        text = _MessageText(message, item, rendered)
        for span in _pieces(item.span.clipped(end), options, boundaries, text):
            number = numbers.get(name.base, options.next_numbers.get(name.base, 0))
            numbers[name.base] = number + 1
            display_name = f"{name.base}#{number}"
            drafts.append(
                Draft(
                    display_name,
                    span,
                    item.role,
                    item.index,
                    text.of(span),
                    (*name.aliases, *text.rules_files(span)),
                    text.is_reminder(span),
                    text.is_added(span),
                    text.is_result,
                )
            )
    return drafts


def outside_media(positions: Iterable[int], media: Sequence[Span]) -> set[int]:
    """Those of these positions at which a block may begin or end: no image or sound is cut."""
    if not media:
        return set(positions)
    starts = [span.start for span in media]
    return {
        position
        for position in positions
        if not (at := bisect_left(starts, position)) or position >= media[at - 1].end
    }


def _pieces(
    span: Span, options: CutOptions, boundaries: Sequence[int], text: _MessageText
) -> Iterator[Span]:
    """Yield the spans of the blocks of one message, from `options.start` on.

    `boundaries` are those of the options from there on, ascending.
    """
    first = min(max(span.start, options.start), span.end)
    within = inside(boundaries, Span(first, span.end))
    own = (at for item in (*text.media, *text.added) for at in (item.start, item.end))
    edges = sorted({first, span.end, *outside_media(within, text.media), *own})
    edges = [edge for edge in edges if first <= edge <= span.end]
    for at, stop in zip(edges, edges[1:], strict=False):
        while stop - at > options.block_tokens and not text.is_media(at):
            end = _block_end(at, options.block_tokens, text.sentence_starts)
            yield Span(at, end)
            at = end
        if stop > at:
            yield Span(at, stop)


def _block_end(start: int, block_tokens: int, sentence_starts: Sequence[int]) -> int:
    """End of a block: the last sentence start in its second half, or its full length."""
    last = bisect_right(sentence_starts, start + block_tokens) - 1
    end = sentence_starts[last] if last >= 0 else 0
    return int(end) if end > start + block_tokens // 2 else start + block_tokens


def inside(positions: Sequence[int], span: Span) -> Sequence[int]:
    """Select those of ascending positions that would split a span."""
    return positions[bisect_right(positions, span.start) : bisect_left(positions, span.end)]


class _MessageText:
    """The text of one message, whose tokens may contain images and sounds.

    A block has at most _TOKEN_CHARS characters for each of its tokens, or _BLOCK_CHARS.
    """

    def __init__(self, message: Message, item: MessageSpan, rendered: Rendered) -> None:
        span, text = item.span, _printed(message, item.span, rendered.sentence_starts)
        # Tags are found in the text with all line breaks.
        elements = list(elements_of(message.printed, item.role))
        files = [each.rules_files(message.printed) for each in elements]
        if len(text) < len(message.printed):
            elements = [each.without_joints(message.joints) for each in elements]
        self.media = clipped(rendered.media, span)
        self._starts = {item.start for item in self.media}
        self._media_ends = [item.end for item in self.media]
        self._media_tokens = [0, *accumulate(map(len, self.media))]
        self._text = text
        self._elements = elements
        # A prompt whose messages have no known spans has them all in one.
        is_of_user = item.role is Role.USER and bool(rendered.turn_spans)
        is_text = is_of_user and not self.media
        self._is_all_added = is_text and has_only_additions(message.printed)
        self.is_result = is_of_user and is_result(message.printed)
        rules = zip(elements, files, strict=True)
        self._rules = [(each, paths) for each, paths in rules if paths][:_MAX_RULES]
        # The tokens of what the client has added in lines of its own, and of reminders among it.
        self.added: Sequence[Span] = ()
        self._reminders: Sequence[Span] = ()
        if not self.media:
            self._alignment = TextAlignment(text, span, rendered.sentence_starts)
            self.sentence_starts = self._alignment.sentence_starts
            added = (each for each in elements if each.is_added)
            lines = ((each, self._alignment.lines(each.start, each.end)) for each in added)
            found = [(each, at) for each, at in lines if at and len(at) >= _MIN_ADDED]
            self.added = [at for _, at in found]
            self._reminders = [at for each, at in found if each.is_reminder]
            return
        all_starts = rendered.sentence_starts
        first, last = bisect_right(all_starts, span.start), bisect_left(all_starts, span.end)
        self.sentence_starts = [int(at) for at in all_starts[first:last]]
        starts = [self._text_position(at) for at in self.sentence_starts]
        self._alignment = TextAlignment(
            text, Span(span.start, self._text_position(span.end)), starts
        )

    def of(self, part: Span) -> str:
        """The approximate text of a block, without reminders of the client beside other text.

        For an image or a sound it is the beginning of its message.
        """
        most = max(_BLOCK_CHARS, _TOKEN_CHARS * len(part))
        if self.is_media(part.start):
            return self._text[:most]
        first, end = self._text_position(part.start), self._text_position(part.end)
        start, stop = self._alignment.characters(Span(first, end))
        return without_reminders(self._text, start, stop, self._elements)[:most]

    def is_reminder(self, part: Span) -> bool:
        """Whether a block is a part of a reminder."""
        return _is_within(part, self._reminders)

    def is_added(self, part: Span) -> bool:
        """Whether a block is a part of what the client has added: a reminder, or a file."""
        return self._is_all_added or _is_within(part, self.added)

    def rules_files(self, part: Span) -> Sequence[str]:
        """The paths and names of the files with rules for agents that a block has a part of."""
        if not self._rules or self.is_media(part.start):
            return ()
        at = Span(self._text_position(part.start), self._text_position(part.end))
        start, end = self._alignment.characters(at)
        within = (paths for each, paths in self._rules if each.start < end and start < each.end)
        paths = dict.fromkeys(chain.from_iterable(within))
        return list(dict.fromkeys(chain(paths, map(_basename, paths))))

    def is_media(self, start: int) -> bool:
        """Whether the block that begins there is an image or a sound."""
        return start in self._starts

    def _text_position(self, position: int) -> int:
        """The position if the images and sounds of the message had no tokens."""
        return position - self._media_tokens[bisect_right(self._media_ends, position)]


def _is_within(part: Span, spans: Sequence[Span]) -> bool:
    """Whether a span lies in one of these ascending, disjoint spans."""
    at = bisect_right(spans, part.start, key=lambda each: each.start) - 1
    return at >= 0 and part.end <= spans[at].end


def _printed(message: Message, span: Span, sentence_starts: Sequence[int] | Positions) -> str:
    """Approximately the text that the template has printed for a message.

    Its parts are joined by nothing where only that gives as many sentences and lines as there are.
    """
    text = message.printed
    if not message.joints or message.source:
        return text
    n_starts = bisect_left(sentence_starts, span.end) - bisect_right(sentence_starts, span.start)
    if len(sentence_starts_in(text)) == n_starts:
        return text
    starts, ends = (0, *(at + 1 for at in message.joints)), (*message.joints, len(text))
    joined = "".join(text[start:end] for start, end in zip(starts, ends, strict=True))
    return joined if len(sentence_starts_in(joined)) == n_starts else text


class TextAlignment:
    """Maps token ranges of a message to its text.

    When the text has as many sentence and line gaps as `sentence_starts` has positions inside the
    message, these are aligned exactly. Between them, or when the numbers differ, positions in the
    text are interpolated, and parts overlap a little at both ends.
    """

    def __init__(
        self, text: str, span: Span, sentence_starts: Sequence[int] | Positions = ()
    ) -> None:
        first = bisect_right(sentence_starts, span.start)
        end = bisect_left(sentence_starts, span.end)
        self.sentence_starts = [int(at) for at in sentence_starts[first:end]]
        text_starts = sentence_starts_in(text) if self.sentence_starts else []
        aligned = self.sentence_starts if len(text_starts) == len(self.sentence_starts) else []
        self._text = text
        self._positions = [span.start, *aligned, max(span.end, span.start + 1)]
        self._characters = [0, *text_starts[: len(aligned)], len(text)]
        self._first_visible = len(text) - len(text.lstrip(_SPACES))

    def of(self, part: Span) -> str:
        """The approximate text of a range of tokens."""
        start, end = self.characters(part)
        return self._text[start:end]

    def characters(self, part: Span) -> tuple[int, int]:
        """Where the text of a range of tokens begins and ends, approximately."""
        start, margin_before = self._at(part.start)
        end, margin_after = self._at(part.end)
        return max(0, start - margin_before), min(end + margin_after, len(self._text))

    def lines(self, start: int, end: int) -> Span | None:
        """The tokens of the whole sentences and lines among the characters [start, end).

        White space after them belongs to them. None if there are none, or where positions in the
        text are estimates.
        """
        if len(self._characters) - 2 != len(self.sentence_starts):
            return None
        space = _WHITE_SPACE.match(self._text, end)
        first = bisect_left(self._characters, 0 if start <= self._first_visible else start)
        last = bisect_right(self._characters, space.end() if space else end) - 1
        return Span(self._positions[first], self._positions[last]) if first < last else None

    def _at(self, position: int) -> tuple[int, int]:
        """Convert a token position to a character index, and its possible error in characters."""
        last = len(self._positions) - 1
        i = max(0, bisect_right(self._positions, position, hi=last) - 1)
        character, aligned = self._characters[i], self._positions[i]
        if position == aligned and i:
            return character, 0
        per_token = (self._characters[i + 1] - character) / (self._positions[i + 1] - aligned)
        return character + int((position - aligned) * per_token), _TEXT_OVERLAP


def sentence_starts_in(text: str) -> list[int]:
    """Return the ascending character indexes where a sentence or line starts after a gap.

    A gap has text on both sides. The same rule is in `patches/src/server-blocks-render.cpp`.
    """
    starts = list[int]()
    end = 0
    for first in range(0, len(text), _SEARCHED_CHARS):
        last = first + _SEARCHED_CHARS
        for gap in _GAP.finditer(text, max(first, end), last):
            end = gap.end()
            starts.append(end)
        while end == last and (more := _WHITE_SPACE.match(text, end, end + _SEARCHED_CHARS)):
            starts[-1] = end = last = more.end()
    first_visible = len(text) - len(text.lstrip(_SPACES))
    return [start for start in starts if first_visible < start < len(text)]


def next_numbers(
    display_names: Iterable[str], previous: Mapping[str, int] | None = None
) -> Mapping[str, int]:
    """The next free number of each base name, after these display names.

    A display name is `name#2`, or `name#2.1` for a piece of a split block.
    """
    maps = [dict(previous or {})] if not isinstance(previous, ChainMap) else previous.maps
    if len(maps) > _MAX_MAPS:  # a chain avoids copying every name in every turn
        merged = dict[str, int]()
        for names in reversed(maps):
            merged.update(names)
        maps = [merged]
    numbers = ChainMap[str, int]({}, *maps)
    for display_name in display_names:
        base, _, rest = display_name.rpartition("#")
        numbers[base] = max(numbers.get(base, 0), int(rest.partition(".")[0]) + 1)
    return numbers


class _Names:
    """Computes the names of each message's blocks on demand."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        # Tool calls by id, of the messages from `_read_from` on.
        self._calls: dict[str, ToolCall] = {}
        # Paths of calls that were parsed, by `id()`: many results may name the same call.
        self._paths: dict[int, str] = {}
        self._read_from = len(messages)

    def of(self, item: MessageSpan) -> _Name:
        if not 0 <= item.index < len(self._messages):
            return _Name(f"{item.role}:{item.index}", ())
        message = self._messages[item.index]
        call = self._call(message.tool_call_id) if message.role is Role.TOOL else None
        return self._name(item.index, message, call)

    def _name(self, index: int, message: Message, call: ToolCall | None) -> _Name:
        calls = [call] if call is not None else message.tool_calls[:_MAX_CALLS]
        aliases = [alias for item in calls for alias in self._call_aliases(item)]
        aliases += [message.block_name, message.name, message.tool_call_id]
        usable = (alias for alias in aliases if 0 < len(alias) <= _MAX_ALIAS)
        base = message.block_name or self._base(index, message, call)
        return _Name(base[:_MAX_NAME], tuple(dict.fromkeys(usable)))

    def _base(self, index: int, message: Message, call: ToolCall | None) -> str:
        if message.role is not Role.TOOL:
            is_first = message.role is Role.SYSTEM and index == 0
            return "system" if is_first else f"{message.role}:{index}"
        path = self._path(call) if call is not None else ""
        if path:
            return f"file:{_basename(path)}"
        return f"tool:{(call.name if call is not None else '') or message.name or index}"

    def _call_aliases(self, call: ToolCall) -> Iterator[str]:
        if path := self._path(call):
            yield path
            yield _basename(path)
        yield call.name
        yield call.id

    def _path(self, call: ToolCall) -> str:
        if id(call) not in self._paths:
            self._paths[id(call)] = call.path
        return self._paths[id(call)]

    def _call(self, id: str) -> ToolCall | None:
        """The latest tool call with this id."""
        while id and id not in self._calls and self._read_from:
            self._read_from -= 1
            for call in reversed(self._messages[self._read_from].tool_calls):
                self._calls.setdefault(call.id, call)
        return self._calls.get(id) if id else None


def _basename(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or path
