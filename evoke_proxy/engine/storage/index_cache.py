"""Caches the snapshots of an index in memory, and reads only changes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from evoke_proxy.adapters.snapshot_index import SnapshotIndex
from evoke_proxy.core.snapshots.snapshots import Changes, Snapshot, apply_changes
from evoke_proxy.thread_pools import DISK, run_in

# The most ids of removed snapshots that are remembered.
_MAX_REMOVED = 4096


class SnapshotIndexCache:
    """The snapshots of an index by id; at the latest read, the most recently used came first.

    Other processes may change the index, too. `refresh` reads their changes in a thread, and
    `items` reads the changes since then. A caller that changes the index must also change this
    cache.
    """

    def __init__(self, index: SnapshotIndex) -> None:
        self._index = index
        self._generation, self._version = -1, -1
        self._n_own_changes = 0
        self._items: dict[str, Snapshot] = {}
        # Removed by this process, perhaps not yet from the index: ignored when the index is read.
        self._removed: dict[str, None] = {}
        self._read_changes()

    @property
    def items(self) -> dict[str, Snapshot]:
        """The snapshots as the index has them now; callers must not change the dictionary."""
        self._read_changes()
        return self._items

    @property
    def latest(self) -> Collection[Snapshot]:
        """The snapshots as of the latest read."""
        return self._items.values()

    async def refresh(self) -> None:
        """Read what other processes have changed, without blocking the event loop."""
        generation, n_own_changes = self._index.generation(), self._n_own_changes
        if generation == self._generation:
            return
        ids = frozenset(self._items)
        changes = await run_in(DISK, self._index.changes, self._version, ids)
        # Changes of this process during the read may be missing in the result: `items` reads them.
        if n_own_changes == self._n_own_changes and changes.version >= self._version:
            self._apply(changes)
            self._generation, self._version = generation, changes.version

    def put(self, item: Snapshot) -> None:
        """Add a snapshot."""
        self._n_own_changes += 1
        self._items[item.id] = item

    def mark(self, id: str, **values: float) -> None:
        """Replace these fields of a snapshot; does nothing when no snapshot has this id."""
        self._n_own_changes += 1
        if id in self.items:
            self._items[id] = replace(self._items[id], **values)  # type: ignore[arg-type]

    def remove(self, id: str) -> None:
        """Remove a snapshot; does nothing when no snapshot has this id."""
        self._n_own_changes += 1
        self._items.pop(id, None)
        self._removed[id] = None
        while len(self._removed) > _MAX_REMOVED:
            del self._removed[next(iter(self._removed))]

    def _apply(self, changes: Changes) -> None:
        items = apply_changes(self._items, changes)
        self._items = {id: item for id, item in items.items() if id not in self._removed}

    def _read_changes(self) -> None:
        generation = self._index.generation()
        if generation != self._generation:
            changes = self._index.changes(self._version, self._items.keys())
            self._apply(changes)
            self._generation, self._version = generation, changes.version
            self._n_own_changes += 1
