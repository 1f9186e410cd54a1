"""Blocks of a prompt: contiguous token ranges with a name, and arithmetic on ranges."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A half-open range [start, end) of prompt positions; ValueError unless 0 <= start <= end."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"[{self.start}, {self.end}) is not a range")

    def __len__(self) -> int:
        return self.end - self.start

    def __contains__(self, position: int) -> bool:
        return self.start <= position < self.end

    def encloses(self, other: Span) -> bool:
        """Whether `other` lies wholly inside."""
        return self.start <= other.start and other.end <= self.end

    def clipped(self, end: int) -> Span:
        """The part below `end`; empty when there is none."""
        return Span(min(self.start, end), min(self.end, end))


class Role(StrEnum):
    """Who a message is from; a template's other role names are mapped to these."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


_ROLES = {role.value: role for role in Role} | {"developer": Role.SYSTEM, "function": Role.TOOL}


def parse_role(name: str) -> Role:
    """The role a template's name stands for; USER for an unknown one."""
    return _ROLES.get(name, Role.USER)


@dataclass(frozen=True, slots=True)
class Block:
    """A range of a prompt with one identity: the unit of scoring, eviction and recovery.

    `key` is for people (`user:7#0`), `label` is its name in calls to llama-server and unique;
    `turn` is the turn of the session that cut it, `message` an index into the request's messages;
    `identity` holds what a text may call it by (path, file name, tool, ids).
    """

    key: str
    label: str
    span: Span
    role: Role
    turn: int
    message: int
    text: str
    identity: tuple[str, ...] = ()
    pinned: bool = False
    preferred: bool = False
    priority: float = 1.0


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same positions as the fewest spans, ascending."""
    given = [span for span in spans if span.start < span.end]
    if all([one.end < other.start for one, other in pairwise(given)]):
        return tuple(given)  # as almost always
    found: list[Span] = []
    for span in sorted(given, key=_start):
        if found and span.start <= found[-1].end:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return tuple(found)


def without(spans: Iterable[Span], removed: Iterable[Span]) -> tuple[Span, ...]:
    """The positions of `spans` that are not in `removed`, merged."""
    left: list[Span] = []
    holes, at = merged(removed), 0
    for span in merged(spans):
        start = span.start
        while at < len(holes) and holes[at].start < span.end:
            if holes[at].start > start:
                left.append(Span(start, holes[at].start))
            start = max(start, holes[at].end)
            if holes[at].end > span.end:  # it may reach into the next span too
                break
            at += 1
        if start < span.end:
            left.append(Span(start, span.end))
    return tuple(left)


def common(spans: Iterable[Span], others: Iterable[Span]) -> tuple[Span, ...]:
    """The positions that are in both, merged."""
    mine = merged(spans)
    return without(mine, without(mine, others))


def clipped(spans: Sequence[Span], part: Span) -> tuple[Span, ...]:
    """What of ascending, disjoint spans lies in `part`; none of it is empty."""
    if not len(part):
        return ()
    first = bisect_right(spans, part.start, key=_end)
    behind = bisect_left(spans, part.end, key=_start)
    found = list(spans[first:behind])
    for at in {0, len(found) - 1} if found else ():
        span = found[at]
        if not part.encloses(span):
            found[at] = Span(max(span.start, part.start), min(span.end, part.end))
    return tuple(found)


def count(spans: Iterable[Span]) -> int:
    """How many positions disjoint spans hold."""
    return sum([span.end - span.start for span in spans])


def _start(span: Span) -> int:
    return span.start


def _end(span: Span) -> int:
    return span.end
