"""Requests of long conversations, of which each repeats the one before: only what follows is read.

What two bodies begin with, byte for byte, was read already: of the new one what is behind the last
message they share is parsed, as it stands behind the same beginning of a body.
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

# Shorter ones are parsed in no time.
_LEAST_BYTES = 16 * 1024
# Larger ones are parsed in steps, each as a whole: to compare them takes the event loop too long.
_MOST_BYTES = 8 * 1024 * 1024
# Bodies with the same first bytes: so many of the latest are compared with a new one.
_ALIKE_BYTES, _ALIKE = 256, 16
_TRIES = 4
# What an object and a string of JSON take besides their text.
_OBJECT_BYTES, _STRING_BYTES = 200, 60
_LISTS = re.compile(rb'"(messages|input)"\s*:\s*\[')
# Stands for the messages that were read already; nobody else can have written it.
_MARK = uuid.uuid4().hex
_MARKED = b'"' + _MARK.encode() + b'"'


@dataclass(eq=False)
class CachedBody:
    """A body that was read; `rendered` is what llama-server has made of it.

    Up to byte `edge` it has `n` whole elements of its list `key`, whose bracket ends `opening`.
    """

    body: bytes
    parsed: dict[str, Any]
    rendered: Rendered | None = None
    key: str = ""
    opening: bytes = b""
    head: Mapping[str, Any] = field(default_factory=dict)
    edge: int = 0
    n: int = 0
    # Large bodies are read in threads: one at a time looks for the edge, others parse all.
    lock: Lock = field(default_factory=Lock, repr=False)

    # Memory of the body and of its parsed form in bytes, estimated.
    n_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        n_objects, n_strings = self.body.count(b"{"), self.body.count(b'"') // 2
        parsed_bytes = _OBJECT_BYTES * n_objects + _STRING_BYTES * n_strings
        self.n_bytes = 2 * len(self.body) + parsed_bytes

    def up_to(self, shared: int) -> bool:
        """Find the last message that ends within so many bytes, from where that is known already;
        False when there is none."""
        if not self.opening and not self._open():
            return False
        at = shared
        for _ in range(_TRIES):
            at = self.body.rfind(b"}", self.edge, at) + 1
            if not at:
                break
            if self._whole(at):
                return True
            at -= 1
        return 0 < self.n and self.edge <= shared

    def _open(self) -> bool:
        """Where the list of messages begins."""
        # Each costs what is before it: a body may have any number of such lists inside others.
        for found in islice(_LISTS.finditer(self.body), _TRIES):
            opening, key = self.body[: found.end()], found[1].decode()
            head = _parsed(opening + _MARKED + b"]}")
            if head is not None and head.pop(key, None) == [_MARK]:
                self.opening, self.key, self.head, self.edge = opening, key, head, len(opening)
                return True
        return False

    def _whole(self, end: int) -> bool:
        """Whether a message ends there; then it is the edge."""
        more = self.body[self.edge : end]
        said = _parsed(b"".join((self.opening, self._before, more, b",", _MARKED, b"]}")))
        items = _items(said, self.key)
        if said is None or not items or items[-1] != _MARK:
            return False
        del said[self.key]
        read = items[self.n > 0 : -1]
        known = _items(self.parsed, self.key)[self.n : self.n + len(read)]
        # Both are otherwise where there are two lists of that name.
        if not _same((said, read), (self.head, known)):
            return False
        self.n, self.edge = self.n + len(read), end
        return True

    @property
    def _before(self) -> bytes:
        return _MARKED if self.n else b""

    def followed(self, body: bytes) -> dict[str, Any] | None:
        """A body that has the same bytes up to the edge, parsed; None when that is not certain."""
        found = _parsed(b"".join((self.opening, self._before, memoryview(body)[self.edge :])))
        items = _items(found, self.key)
        if found is None or not items or items[0] != _MARK:
            return None
        found[self.key] = self.parsed[self.key][: self.n] + items[1:]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class ReadBody:
    """A body as what it says. Of the lists that `known` names the first so many elements are those
    of `before`, where there is one, and end at byte `edge` of both."""

    body: bytes
    parsed: dict[str, Any]
    known: Mapping[str, int] = field(default_factory=dict)
    before: CachedBody | None = None
    edge: int = 0


class BodyCache:
    """The latest bodies of at least so many bytes, as long as somebody else keeps them."""

    def __init__(self, least: int = _LEAST_BYTES) -> None:
        self._least = least
        self._latest: dict[tuple[str, bytes], deque[weakref.ref[CachedBody]]] = {}

    def read(self, body: bytes, tenant: str) -> ReadBody | None:
        """A long body that goes on from one that is kept; None when it is to be parsed as any."""
        if not self._least <= len(body) <= _MOST_BYTES:
            return None
        kept, shared = self._nearest(body, tenant)
        if kept is None or 2 * shared < len(body) or not kept.lock.acquire(blocking=False):
            return None
        try:
            parsed = kept.followed(body) if kept.up_to(shared) else None
            if parsed is None:
                return None
            return ReadBody(body, parsed, {kept.key: kept.n}, kept, kept.edge)
        finally:
            kept.lock.release()

    def keep(self, read: ReadBody, tenant: str) -> CachedBody | None:
        """Have later bodies compared with this one; None when it is too short for that."""
        if not self._least <= len(read.body) <= _MOST_BYTES:
            return None
        kept, before = CachedBody(read.body, read.parsed), read.before
        if before is not None:
            kept.key, kept.opening, kept.head = before.key, before.opening, before.head
            kept.edge, kept.n = read.edge, read.known[before.key]
        key = (tenant, read.body[:_ALIKE_BYTES])
        latest = self._latest.setdefault(key, deque(maxlen=_ALIKE))
        latest.append(weakref.ref(kept, lambda gone: self._forget(key, gone)))
        return kept

    def _forget(self, key: tuple[str, bytes], gone: weakref.ref[CachedBody]) -> None:
        latest = self._latest.get(key)
        if latest is not None and gone in latest:
            latest.remove(gone)
        if not latest:
            self._latest.pop(key, None)

    def _nearest(self, body: bytes, tenant: str) -> tuple[CachedBody | None, int]:
        """The one that a body shares most with, and how many bytes."""
        ours = np.frombuffer(body, np.uint8)
        best: tuple[CachedBody | None, int] = (None, 0)
        for kept in self._alike((tenant, body[:_ALIKE_BYTES])):
            shared = common_prefix(np.frombuffer(kept.body, np.uint8), ours)
            best = (kept, shared) if shared > best[1] else best
        return best

    def _alike(self, key: tuple[str, bytes]) -> Iterator[CachedBody]:
        for reference in list(self._latest.get(key, ())):
            kept = reference()
            if kept is not None:
                yield kept


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _same(one: object, other: object) -> bool:
    try:
        return one == other
    except RecursionError:  # what can be parsed may be too deep to be compared
        return False


def _items(found: Mapping[str, Any] | None, key: str) -> list[Any]:
    items = found.get(key) if found is not None else None
    return items if isinstance(items, list) else []
