"""The snapshots of an index, in memory: read once, then only what has changed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace

from evoke_proxy.adapters.snapshot_index import SnapshotIndex
from evoke_proxy.core.snapshots.snapshots import Changes, Snapshot, as_changed

# Ids of removed snapshots that are remembered.
_REMEMBERED = 4096


class SnapshotIndexCache:
    """All of them by id, the latest used first as of the last look at the index. Others may change
    it, too: what they did is read in a thread by `refresh`, and what is left of it when somebody
    looks.

    What its owner changes there it says here.
    """

    def __init__(self, index: SnapshotIndex) -> None:
        self._index = index
        self._generation, self._version, self._touched = -1, -1, 0
        self._items: dict[str, Snapshot] = {}
        # Removed here, and maybe not yet from the index: never read from there again.
        self._removed: dict[str, None] = {}
        self._look()

    @property
    def items(self) -> dict[str, Snapshot]:
        """As the index has them now; not to be changed."""
        self._look()
        return self._items

    @property
    def latest(self) -> Collection[Snapshot]:
        """As they were when somebody last looked."""
        return self._items.values()

    async def refresh(self) -> None:
        """Read what others have changed while other requests go on."""
        generation, touched = self._index.generation(), self._touched
        if generation == self._generation:
            return
        seen = frozenset(self._items)
        changes = await asyncio.to_thread(self._index.changes, self._version, seen)
        # What was changed here meanwhile may be older in what was read: it is read when needed.
        if touched == self._touched and changes.version >= self._version:
            self._take(changes)
            self._generation, self._version = generation, changes.version

    def _take(self, changes: Changes) -> None:
        found = as_changed(self._items, changes)
        self._items = {id: item for id, item in found.items() if id not in self._removed}

    def put(self, item: Snapshot) -> None:
        """There is one more."""
        self._touched += 1
        self._items[item.id] = item

    def mark(self, id: str, **values: float) -> None:
        """These fields of one are others, if it is still there."""
        self._touched += 1
        if id in self.items:
            self._items[id] = replace(self._items[id], **values)  # type: ignore[arg-type]

    def remove(self, id: str) -> None:
        """One is there no more."""
        self._touched += 1
        self._items.pop(id, None)
        self._removed[id] = None
        while len(self._removed) > _REMEMBERED:
            del self._removed[next(iter(self._removed))]

    def _look(self) -> None:
        generation = self._index.generation()
        if generation != self._generation:
            changes = self._index.changes(self._version, self._items.keys())
            self._take(changes)
            self._generation, self._version = generation, changes.version
            self._touched += 1
