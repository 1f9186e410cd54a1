"""The snapshots of one directory: files and index as one, within bounds, verified."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.adapters.snapshot_files import PART, WHOLE, SnapshotFiles
from evoke_proxy.adapters.store import Store
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.core.rendered import Tokens
from evoke_proxy.core.snapshots import Bounds, Snapshot, has_room, hits_at, superseded, surplus
from evoke_proxy.errors import SnapshotUnusable

_log = logging.getLogger(__name__)
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Label:
    """What a snapshot to be is of, and where in its conversation it stands."""

    tenant: str
    fingerprint: str
    branch: str
    kind: str
    prefill_s: float


class Vault:
    """Use `open` before all else, `close` at the end; `claim` it to be the one that changes it."""

    def __init__(self, config: SnapshotsConfig, metrics: Metrics | None = None) -> None:
        self._bounds = _bounds(config)
        self._metrics = metrics or Metrics()
        self.files = SnapshotFiles(Path(config.directory))
        self._store: Store | None = None
        self._known: dict[str, Snapshot] = {}
        self._generation = -1

    def open(self, claim: bool = True) -> None:
        """Take over what is there, files and index made to agree; ConfigError when unusable."""
        self.files.prepare()
        if claim:
            self.files.claim()
        try:
            self._store = Store(self.files.directory / "index.sqlite")
            self._reload()
            if claim:
                self._reconcile()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process have it."""
        if self._store is not None:
            self._store.close()
        self.files.free()

    def adjust(self, config: SnapshotsConfig) -> None:
        """Other bounds, at once; the directory stays what it was."""
        self._bounds = _bounds(config)
        self.trim()

    @property
    def snapshots(self) -> Collection[Snapshot]:
        """All of them, the latest used first as of the last look at the index."""
        assert self._store is not None
        if self._store.generation() != self._generation:
            self._reload()
        return self._known.values()

    def of(self, tenant: str, fingerprint: str) -> list[Snapshot]:
        """Those that may be restored for a tenant on a server of this fingerprint."""
        mine = (tenant, fingerprint)
        return [item for item in self.snapshots if (item.tenant, item.fingerprint) == mine]

    def has_room(self, n_bytes: float) -> bool:
        """Whether one more of this size can be kept at all."""
        return has_room(self.snapshots, self._bounds, int(n_bytes), self.files.free_bytes())

    @staticmethod
    def part() -> str:
        """The name of a file that llama-server is to write next."""
        return uuid.uuid4().hex[:20] + PART

    async def keep(self, part: str, n_bytes: int, tokens: Tokens, label: Label) -> Snapshot:
        """What llama-server has just written becomes a snapshot; others may go for it.

        Raises SnapshotUnusable when it is not what it should be; nothing is left of it then.
        """
        id, now = part.removesuffix(PART), time.time()
        seal = (part, id + WHOLE, n_bytes, tokens)
        checksum = await asyncio.to_thread(self.files.seal, *seal)
        new = Snapshot(
            *(id, label.tenant, label.fingerprint, label.branch, label.kind, n_bytes, checksum),
            *(label.prefill_s, now, now),
            tokens=tokens,
        )
        self._put(new)
        for old in superseded(self.snapshots, new):
            self.delete(old, "superseded")
        self.trim()
        return new

    async def verify(self, snapshot: Snapshot) -> None:
        """Raises SnapshotUnusable, and sets it aside, unless its file is what was saved."""
        check = (_name(snapshot), snapshot.n_bytes, snapshot.checksum)
        try:
            await asyncio.to_thread(self.files.verify, *check)
        except SnapshotUnusable as error:
            self.set_aside(snapshot, error.reason)
            raise

    def begin_restore(self, snapshot: Snapshot) -> None:
        """From here on it is suspect: should llama-server die of it, it is not tried again."""
        current = self._current(snapshot)
        if current is not None:
            self._put(replace(current, suspect=True))

    def end_restore(self, snapshot: Snapshot, useful: bool) -> None:
        """llama-server has lived through it."""
        current, now = self._current(snapshot), time.time()
        if current is None:  # deleted meanwhile
            return
        hits = hits_at(current, now, self._bounds.half_life_s) + useful
        used = now if useful else current.used
        self._put(replace(current, suspect=False, used=used, hits=hits))

    def set_aside(self, snapshot: Snapshot, reason: str) -> None:
        """Out of the index, its file kept for whoever wants to look at it."""
        _log.warning("snapshot %s set aside: %s", snapshot.id, reason)
        self._metrics.snapshots_bad.labels(reason=reason).inc()
        self.files.set_aside(_name(snapshot))
        self._remove(snapshot)

    def delete(self, snapshot: Snapshot, reason: str) -> None:
        """Delete it, row first: a file without a row is a leaving, the reverse a lie."""
        self._metrics.snapshots_gone.labels(reason=reason).inc()
        self._remove(snapshot)
        self.files.discard(_name(snapshot))

    def pin(self, snapshot: Snapshot, pinned: bool) -> None:
        """A pinned one is never deleted for room, age or a newer one."""
        self._put(replace(snapshot, pinned=pinned))

    def trim(self) -> None:
        """Be within the bounds again."""
        free = self.files.free_bytes()
        for snapshot, reason in surplus(self.snapshots, self._bounds, free, time.time()):
            self.delete(snapshot, reason)
        self._metrics.snapshots.set(len(self._known))
        self._metrics.snapshot_bytes.set(sum(item.n_bytes for item in self._known.values()))

    def summary(self) -> Mapping[str, Any]:
        """What readiness shows of it."""
        n_bytes = sum(item.n_bytes for item in self.snapshots)
        return {"snapshots": len(self._known), "bytes": n_bytes}

    def _reconcile(self) -> None:
        """Rows without their file go, files without a row too, and whatever was being restored."""
        sizes = dict(self.files.sizes())
        for item in list(self._known.values()):
            size = sizes.pop(_name(item), None)
            if size is None:
                self.set_aside(item, "missing")
            elif size != item.n_bytes:
                self.set_aside(item, "size")
            elif item.suspect:
                self.set_aside(item, "suspect")
        for name in sizes:
            self.files.discard(name)
        self.trim()

    def _current(self, snapshot: Snapshot) -> Snapshot | None:
        """As the index has it now: whoever looks after it may have pinned or deleted it."""
        return next((item for item in self.snapshots if item.id == snapshot.id), None)

    def _reload(self) -> None:
        assert self._store is not None
        self._generation = self._store.generation()
        self._known = {item.id: item for item in self._store.all()}

    def _put(self, snapshot: Snapshot) -> None:
        assert self._store is not None
        self._store.put(snapshot)
        self._known[snapshot.id] = snapshot

    def _remove(self, snapshot: Snapshot) -> None:
        assert self._store is not None
        self._store.remove(snapshot.id)
        self._known.pop(snapshot.id, None)


def _name(snapshot: Snapshot) -> str:
    return snapshot.id + WHOLE


def _bounds(config: SnapshotsConfig) -> Bounds:
    return Bounds(
        max_bytes=config.max_mib * _MIB,
        max_count=config.max_count,
        max_age_s=config.max_age_h * 3600,
        min_free_bytes=config.min_free_mib * _MIB,
        tenant_bytes=config.tenant_mib * _MIB,
        half_life_s=config.half_life_h * 3600,
    )
