"""Spans of token positions, and the blocks that a prompt is divided into."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

# Sets a field of a frozen object while it is created.
_set = object.__setattr__


@dataclass(frozen=True, slots=True, order=True, init=False)
class Span:
    """A half-open range [start, end) of prompt positions.

    Creating one raises ValueError unless 0 <= start <= end. A turn creates hundreds, in less than
    half the time that the generated constructor takes.
    """

    start: int
    end: int

    def __init__(self, start: int, end: int) -> None:
        if not 0 <= start <= end:
            raise ValueError(f"[{start}, {end}) is not a range")
        _set(self, "start", start)
        _set(self, "end", end)

    def __len__(self) -> int:
        return self.end - self.start

    def __contains__(self, position: int) -> bool:
        return self.start <= position < self.end

    def encloses(self, other: Span) -> bool:
        """Whether `other` lies entirely inside."""
        return self.start <= other.start and other.end <= self.end

    def clipped(self, end: int) -> Span:
        """The part before position `end`; may be empty."""
        return Span(min(self.start, end), min(self.end, end))


class Role(StrEnum):
    """The author of a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


_ROLES = {role.value: role for role in Role} | {"developer": Role.SYSTEM, "function": Role.TOOL}


def parse_role(name: str) -> Role:
    """Map a role name of a request or a chat template to a `Role`; USER for an unknown name."""
    return _ROLES.get(name, Role.USER)


@dataclass(frozen=True, slots=True)
class Block:
    """A named range of a prompt: the unit of scoring, eviction and recovery.

    Attributes:
        display_name: name for people, such as `user:7#0`.
        label: unique name in calls to llama-server; includes a hash of all tokens up to its end.
        span: token positions in the prompt.
        role: author of the message.
        turn: number of the session's turn that created the block.
        message: index of the message in the request.
        text: approximate text of these tokens.
        aliases: other names by which a text may mention the block: path, file name, tool, ids.
        pinned: whether the block must stay resident.
        preferred: whether the client marked its message "prefer".
        priority: factor of its keep-score, which the client sets for a turn.
        is_reminder: whether it is a part of a reminder that a client adds to messages of the user
            or of tools, so that it is not searched; see core/request/client_text.py.
        is_added: whether it is a part of what a client adds to a message: a reminder or a file; or
            of a message of the user that has nothing else.
        is_result: whether its message is the result of a tool that a client sends as one of the
            user.
    """

    display_name: str
    label: str
    span: Span
    role: Role
    turn: int
    message: int
    text: str
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    preferred: bool = False
    priority: float = 1.0
    is_reminder: bool = False
    is_added: bool = False
    is_result: bool = False

    def pieces(self, n_tokens: int) -> Iterator[Block]:
        """Yield parts of at most `n_tokens` with labels of their own; nothing if the block fits."""
        start, end = self.span.start, self.span.end
        if end - start <= n_tokens:
            return
        for at in range(start, end, n_tokens):
            span = Span(at, min(end, at + n_tokens))
            yield replace(self, label=f"{self.label}/{span.start}-{span.end}", span=span)


def block_of_piece(label: str) -> str:
    """Return the label of the block that a piece with this label is part of."""
    return label.rpartition("/")[0]


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Merge spans into the fewest that cover the same positions, in ascending order."""
    filled = [span for span in spans if span.start < span.end]
    if all([one.end < other.start for one, other in pairwise(filled)]):
        return tuple(filled)  # the usual case
    result: list[Span] = []
    for span in sorted(filled, key=_start):
        if result and span.start <= result[-1].end:
            result[-1] = Span(result[-1].start, max(result[-1].end, span.end))
        else:
            result.append(span)
    return tuple(result)


def without(spans: Iterable[Span], removed: Iterable[Span]) -> tuple[Span, ...]:
    """Subtract the positions of `removed` from `spans`; the result is merged."""
    remaining: list[Span] = []
    holes, at = merged(removed), 0
    for span in merged(spans):
        start = span.start
        while at < len(holes) and holes[at].start < span.end:
            if holes[at].start > start:
                remaining.append(Span(start, holes[at].start))
            start = max(start, holes[at].end)
            if holes[at].end > span.end:  # this hole may extend into the next span
                break
            at += 1
        if start < span.end:
            remaining.append(Span(start, span.end))
    return tuple(remaining)


def common(spans: Iterable[Span], others: Iterable[Span]) -> tuple[Span, ...]:
    """Intersect two sets of spans; the result is merged."""
    first = merged(spans)
    return without(first, without(first, others))


def clipped(spans: Sequence[Span], part: Span) -> tuple[Span, ...]:
    """Cut ascending, disjoint spans to the range `part`; empty spans are left out."""
    if not len(part):
        return ()
    first = bisect_right(spans, part.start, key=_end)
    last = bisect_left(spans, part.end, key=_start)
    inside = list(spans[first:last])
    for at in {0, len(inside) - 1} if inside else ():
        span = inside[at]
        if not part.encloses(span):
            inside[at] = Span(max(span.start, part.start), min(span.end, part.end))
    return tuple(inside)


def count(spans: Iterable[Span]) -> int:
    """Return the number of positions in disjoint spans."""
    return sum([span.end - span.start for span in spans])


def _start(span: Span) -> int:
    return span.start


def _end(span: Span) -> int:
    return span.end
