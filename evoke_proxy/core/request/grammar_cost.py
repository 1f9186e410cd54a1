"""Estimates how much time llama-server's sampler needs for a grammar, before it is sent.

llama-server keeps one stack for each way in which the grammar can produce the text so far. Parts
that may be empty multiply the stacks: after each character, every stack continues at each part that
can follow when the parts between are skipped. A grammar of 100 characters can occupy the main loop
for minutes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

# Larger numbers are cut to this: products stay small integers.
_MAX = 1 << 20
_GRAMMAR_TOKEN = re.compile(
    r"(?P<space>\s+|\#[^\n]*)"
    r"|(?P<rule>[A-Za-z0-9_-]+)\s*::="
    r'|(?P<terminal>"(?:[^"\\]|\\.)*+"?|\[(?:[^\]\\]|\\.)*+\]?|!?<[^>]*+>?|\.)'
    r"|(?P<name>[A-Za-z0-9_-]+)"
    r"|(?P<repeat>[?*+]|\{\s*\d*\s*,?\s*\d*\s*\})"
    r"|(?P<mark>[()|])"
    r"|(?P<other>.)",
    re.DOTALL,
)
_PATTERN_TOKEN = re.compile(
    r"(?P<repeat>[?*+]|\{\d*,?\d*\})"
    r"|(?P<mark>\((?:\?:)?|[)|])"
    r"|(?P<space>[$^])"
    r"|(?P<terminal>\\.|\[(?:[^\]\\]|\\.)*+\]?|.)",
    re.DOTALL,
)
# How often a part without a limit occurs.
_UNBOUNDED = _MAX


@dataclass(frozen=True, slots=True)
class _Item:
    """A part of a sequence: a terminal or a reference to a rule, with its repetitions.

    Attributes:
        rule: name of the rule; empty for a terminal.
        least, most: how often it occurs; `most` may be _UNBOUNDED.
    """

    rule: str = ""
    least: int = 1
    most: int = 1


@dataclass(frozen=True, slots=True)
class _Width:
    """Number of parts of a grammar that can come next at one point of a text.

    Attributes:
        skips: maximum number along one choice of alternatives; those before the last are skipped.
        paths: number over all alternatives.
    """

    skips: int = 0
    paths: int = 0

    def __add__(self, other: _Width) -> _Width:
        return _Width(min(_MAX, self.skips + other.skips), min(_MAX, self.paths + other.paths))

    @property
    def product(self) -> int:
        """The estimate of the work at this point."""
        return self.skips * self.paths

    def larger(self, other: _Width) -> _Width:
        """The larger of each number."""
        return _Width(max(self.skips, other.skips), max(self.paths, other.paths))

    def times(self, count: int) -> _Width:
        """The width of `count` such parts after one another."""
        return _Width(min(_MAX, self.skips * count), min(_MAX, self.paths * count))


_NOTHING, _TERMINAL = _Width(), _Width(1, 1)
_Rules = dict[str, list[list[_Item]]]


def grammar_cost(grammar: str) -> int:
    """The largest product of skipped parts and paths at any point of a GBNF grammar."""
    return _Cost(_parsed(grammar, _GRAMMAR_TOKEN)).largest()


def pattern_cost(pattern: str) -> int:
    """The same for a regular expression, which llama-server converts to a grammar."""
    return _Cost(_parsed(pattern, _PATTERN_TOKEN)).largest()


def _parsed(text: str, token: re.Pattern[str]) -> _Rules:
    """The rules of a grammar; each group becomes a rule. Malformed parts are ignored."""
    name = "(pattern)"
    rules: _Rules = {name: [[]]}
    outer: list[str] = []  # the rules around the current group
    for match in token.finditer(text):
        sequence = rules[name][-1]
        value = match[0]
        if match.lastgroup == "rule":
            name, outer = match["rule"], []
            rules[name] = [[]]
        elif match.lastgroup == "terminal":
            if not value.startswith('""') or len(value) > 2:  # an empty text is no part
                sequence.append(_Item())
        elif match.lastgroup == "name":
            sequence.append(_Item(value))
        elif match.lastgroup == "repeat" and sequence:
            sequence[-1] = _repeated(sequence[-1], value)
        elif value == "|":
            rules[name].append([])
        elif value.startswith("("):
            outer.append(name)
            name = f"({len(rules)})"
            sequence.append(_Item(name))
            rules[name] = [[]]
        elif value == ")" and outer:
            name = outer.pop()
    return rules


def _repeated(item: _Item, repeat: str) -> _Item:
    if repeat in ("?", "*", "+"):
        least, most = {"?": (0, 1), "*": (0, _UNBOUNDED), "+": (1, _UNBOUNDED)}[repeat]
    else:
        first, comma, last = re.sub(r"[{}\s]", "", repeat).partition(",")
        least = int(first[:9] or 0)
        most = int(last[:9]) if last else (_UNBOUNDED if comma else least)
    return _Item(item.rule, least if item.least else 0, most)


class _Cost:
    """Computes the widths of rules, each once. References to unknown rules count as nothing."""

    def __init__(self, rules: _Rules) -> None:
        self._rules = rules
        self._empty = _rules_that_may_be_empty(rules)
        self._first: dict[str, _Width] = {}  # at the start of a rule
        self._last: dict[str, _Width] = {}  # inside a rule, up to its end

    def largest(self) -> int:
        """The largest product of skips and paths at any point."""
        largest = 0
        for name in _inner_first(self._rules, self._leading):
            self._first[name] = self._start(name)
            largest = max(largest, self._first[name].product)
        for name in _inner_first(self._rules, self._trailing):
            self._last[name] = _NOTHING
            for sequence in self._rules[name]:
                for width, reaches_end in self._inside(sequence):
                    largest = max(largest, width.product)
                    if reaches_end:
                        self._last[name] = self._last[name].larger(width)
        return largest

    def _leading(self, name: str) -> Iterator[str]:
        """The rules that a text of this rule can begin with."""
        for sequence in self._rules[name]:
            yield from self._until_required(sequence)

    def _trailing(self, name: str) -> Iterator[str]:
        """The rules that a text of this rule can end with."""
        for sequence in self._rules[name]:
            yield from self._until_required(reversed(sequence))

    def _until_required(self, items: Iterable[_Item]) -> Iterator[str]:
        for item in items:
            if item.rule in self._rules:
                yield item.rule
            if not self._may_be_empty(item):
                return

    def _may_be_empty(self, item: _Item) -> bool:
        return not item.least or item.rule in self._empty

    def _start(self, name: str) -> _Width:
        """The width at the start of a rule; its sequences are alternatives."""
        starts = [next(iter(self._suffixes(sequence)), _NOTHING) for sequence in self._rules[name]]
        skips = max(width.skips for width in starts)
        return _Width(skips, min(_MAX, sum(width.paths for width in starts)))

    def _suffixes(self, sequence: Sequence[_Item]) -> list[_Width]:
        """The width at each part of a sequence, and at its end."""
        widths = [_NOTHING]
        for item in reversed(sequence):
            after = widths[-1] if self._may_be_empty(item) else _NOTHING
            widths.append(self._width(item) + after)
        return widths[::-1]

    def _inside(self, sequence: Sequence[_Item]) -> Iterator[tuple[_Width, bool]]:
        """The width inside each part of a sequence, and whether only the end is required after."""
        suffixes = self._suffixes(sequence)
        reaches_end = True
        for at in range(len(sequence) - 1, -1, -1):
            item = sequence[at]
            width = self._last.get(item.rule, _NOTHING) + suffixes[at + 1]
            yield width + (self._width(item) if item.most != 1 else _NOTHING), reaches_end
            reaches_end = reaches_end and self._may_be_empty(item)

    def _width(self, item: _Item) -> _Width:
        if not item.rule:
            return _TERMINAL
        width = self._first.get(item.rule, _NOTHING)
        return width.times(item.most) if item.rule in self._empty else width


def _rules_that_may_be_empty(rules: _Rules) -> frozenset[str]:
    """The rules with a sequence of which every part may be empty."""
    users: dict[str, list[tuple[str, int]]] = {}
    n_required: dict[tuple[str, int], int] = {}
    ready: list[str] = []
    for name, sequences in rules.items():
        for number, sequence in enumerate(sequences):
            required = [item.rule for item in sequence if item.least]
            n_required[name, number] = len(required)
            for rule in required:
                users.setdefault(rule, []).append((name, number))
            if not required:
                ready.append(name)
    empty: set[str] = set()
    while ready:
        name = ready.pop()
        if name not in empty:
            empty.add(name)
            for user in users.get(name, ()):
                n_required[user] -= 1
                if not n_required[user]:
                    ready.append(user[0])
    return frozenset(empty - {""})


def _inner_first(rules: Collection[str], inner: Callable[[str], Iterator[str]]) -> Iterator[str]:
    """Yield the rules, each after the rules that `inner` names for it, except within a cycle."""
    visited: set[str] = set()
    for start in rules:
        path = [(start, inner(start))] if start not in visited else []
        visited.add(start)
        while path:
            name, rest = path[-1]
            following = next((rule for rule in rest if rule not in visited), None)
            if following is None:
                path.pop()
                yield name
            else:
                visited.add(following)
                path.append((following, inner(following)))
