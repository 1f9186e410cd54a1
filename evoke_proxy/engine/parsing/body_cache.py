"""Parses a long body incrementally, when it repeats an earlier body of its conversation.

Two bodies that begin with the same bytes have the same messages there. Of the new body only the
part behind the last shared message is parsed, and joined to the messages of the earlier one.
"""

from __future__ import annotations

import re
import uuid
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import Any

import numpy as np
import orjson

from evoke_proxy.core.prompt.rendered import Rendered, common_prefix
from evoke_proxy.core.request.json_parsing import count_byte

# Shorter bodies are parsed whole, which takes microseconds.
_LEAST_BYTES = 16 * 1024
# Larger bodies are parsed whole, in pieces: comparing them would take the event loop too long.
_MOST_BYTES = 8 * 1024 * 1024
# A new body is compared with the latest bodies that have the same first bytes.
_ALIKE_BYTES, _ALIKE = 256, 16
_TRIES = 4
# Memory of a parsed object and of a parsed string, besides their text.
_OBJECT_BYTES, _STRING_BYTES = 200, 60
_LISTS = re.compile(rb'"(messages|input)"\s*:\s*\[')
# Stands in for the messages that were parsed already; no client can guess it.
_MARK = uuid.uuid4().hex
_QUOTED_MARK = b'"' + _MARK.encode() + b'"'


@dataclass(eq=False)
class CachedBody:
    """A parsed body that later bodies are compared with."""

    body: bytes
    parsed: dict[str, Any]
    # The prompt that llama-server rendered from it.
    rendered: Rendered | None = None
    # The name of its list of messages.
    key: str = ""
    # The body up to and with the bracket that opens the list.
    opening: bytes = b""
    # The members of the body before the list.
    head: Mapping[str, Any] = field(default_factory=dict)
    # The byte behind the last message that was located, and the number of messages up to there.
    edge: int = 0
    n: int = 0
    # Large bodies are parsed in threads. One thread at a time moves the edge; others parse all.
    lock: Lock = field(default_factory=Lock, repr=False)

    # The number of opening braces and of quotes in the body.
    n_braces: int = 0
    n_quotes: int = 0

    @classmethod
    def of(cls, read: ReadBody) -> CachedBody:
        """Return the cached form of a body; the part that an earlier one has is not read."""
        cached, before = cls(read.body, read.parsed), read.before
        if before is None:
            cached.n_braces, cached.n_quotes = _counts(read.body)
            return cached
        cached.key, cached.opening, cached.head = before.key, before.opening, before.head
        cached.edge, cached.n = read.edge, read.n_shared[before.key]
        added, removed = _counts(read.body[read.edge :]), _counts(before.body[read.edge :])
        cached.n_braces = before.n_braces + added[0] - removed[0]
        cached.n_quotes = before.n_quotes + added[1] - removed[1]
        return cached

    @property
    def n_bytes(self) -> int:
        """Memory of the body and of its parsed form in bytes, estimated."""
        parsed_bytes = _OBJECT_BYTES * self.n_braces + _STRING_BYTES * (self.n_quotes // 2)
        return 2 * len(self.body) + parsed_bytes

    def up_to(self, shared: int) -> bool:
        """Move the edge to the last message that ends within `shared` bytes.

        Returns False when there is none.
        """
        if not self.opening and not self._open():
            return False
        at = shared
        for _ in range(_TRIES):
            at = self.body.rfind(b"}", self.edge, at) + 1
            if not at:
                break
            if self._move_edge(at):
                return True
            at -= 1
        return 0 < self.n and self.edge <= shared

    def _open(self) -> bool:
        """Locate the list of messages; False when there is none."""
        # Each try parses all bytes before it, and a body may have any number of nested lists.
        for match in islice(_LISTS.finditer(self.body), _TRIES):
            opening, key = self.body[: match.end()], match[1].decode()
            head = _parsed(opening + _QUOTED_MARK + b"]}")
            if head is not None and head.pop(key, None) == [_MARK]:
                self.opening, self.key, self.head, self.edge = opening, key, head, len(opening)
                return True
        return False

    def _move_edge(self, end: int) -> bool:
        """Move the edge there if a message ends there; returns whether one does."""
        more = self.body[self.edge : end]
        parsed = _parsed(b"".join((self.opening, self._before, more, b",", _QUOTED_MARK, b"]}")))
        items = _items(parsed, self.key)
        if parsed is None or not items or items[-1] != _MARK:
            return False
        del parsed[self.key]
        read = items[self.n > 0 : -1]
        expected = _items(self.parsed, self.key)[self.n : self.n + len(read)]
        # They differ when the body has two lists of that name.
        if not _same((parsed, read), (self.head, expected)):
            return False
        self.n, self.edge = self.n + len(read), end
        return True

    @property
    def _before(self) -> bytes:
        return _QUOTED_MARK if self.n else b""

    def parse_continued(self, body: bytes) -> dict[str, Any] | None:
        """Parse a body that has the same bytes up to the edge; None when it is ambiguous."""
        parsed = _parsed(b"".join((self.opening, self._before, memoryview(body)[self.edge :])))
        items = _items(parsed, self.key)
        if parsed is None or not items or items[0] != _MARK:
            return None
        parsed[self.key] = self.parsed[self.key][: self.n] + items[1:]
        return parsed


@dataclass(frozen=True, slots=True, eq=False)
class ReadBody:
    """A parsed body, and what it shares with an earlier one."""

    body: bytes
    parsed: dict[str, Any]
    # Number of leading elements, by the name of their list, that are those of `before`.
    n_shared: Mapping[str, int] = field(default_factory=dict)
    before: CachedBody | None = None
    # The byte, in both bodies, behind the last shared element.
    edge: int = 0


class BodyCache:
    """The latest bodies, by weak references: conversations own them."""

    def __init__(self, least: int = _LEAST_BYTES) -> None:
        self._least = least
        self._latest: dict[tuple[str, bytes], deque[weakref.ref[CachedBody]]] = {}

    def read(self, body: bytes, tenant: str) -> ReadBody | None:
        """Parse a body that continues a cached one; None when it must be parsed whole."""
        if not self._least <= len(body) <= _MOST_BYTES:
            return None
        cached, shared = self._nearest(body, tenant)
        if cached is None or 2 * shared < len(body) or not cached.lock.acquire(blocking=False):
            return None
        try:
            parsed = cached.parse_continued(body) if cached.up_to(shared) else None
            if parsed is None:
                return None
            return ReadBody(body, parsed, {cached.key: cached.n}, cached, cached.edge)
        finally:
            cached.lock.release()

    def keep(self, read: ReadBody, tenant: str) -> CachedBody | None:
        """Cache a body for later ones; None when it is too short or too long."""
        if not self._least <= len(read.body) <= _MOST_BYTES:
            return None
        cached = CachedBody.of(read)
        key = (tenant, read.body[:_ALIKE_BYTES])
        references = self._latest.setdefault(key, deque(maxlen=_ALIKE))
        references.append(weakref.ref(cached, lambda reference: self._forget(key, reference)))
        return cached

    def _forget(self, key: tuple[str, bytes], reference: weakref.ref[CachedBody]) -> None:
        references = self._latest.get(key)
        if references is not None and reference in references:
            references.remove(reference)
        if not references:
            self._latest.pop(key, None)

    def _nearest(self, body: bytes, tenant: str) -> tuple[CachedBody | None, int]:
        """The cached body that shares most leading bytes with a body, and their number."""
        ours = np.frombuffer(body, np.uint8)
        best: tuple[CachedBody | None, int] = (None, 0)
        for cached in self._alike((tenant, body[:_ALIKE_BYTES])):
            shared = common_prefix(np.frombuffer(cached.body, np.uint8), ours)
            best = (cached, shared) if shared > best[1] else best
        return best

    def _alike(self, key: tuple[str, bytes]) -> Iterator[CachedBody]:
        for reference in list(self._latest.get(key, ())):
            cached = reference()
            if cached is not None:
                yield cached


def _counts(text: bytes) -> tuple[int, int]:
    """The number of opening braces and of quotes in a part of a body."""
    return count_byte(text, b"{"), count_byte(text, b'"')


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _same(one: object, other: object) -> bool:
    try:
        return one == other
    except RecursionError:  # deep nesting can be parsed and yet be too deep to compare
        return False


def _items(parsed: Mapping[str, Any] | None, key: str) -> list[Any]:
    items = parsed.get(key) if parsed is not None else None
    return items if isinstance(items, list) else []
