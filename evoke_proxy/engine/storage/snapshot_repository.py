"""The snapshots of one directory: files and index kept consistent, within limits, verified."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evoke_proxy.adapters.cipher import EncryptedFormat
from evoke_proxy.adapters.clock import SteadyClock
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.adapters.secret_files import read_token
from evoke_proxy.adapters.snapshot_files import INDEX, PART, SEALED, Sealed, SnapshotFiles
from evoke_proxy.adapters.snapshot_index import Owner, Record, SnapshotIndex, pack
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.snapshots.disk_format import DiskFormat
from evoke_proxy.core.snapshots.snapshots import (
    Bounds,
    Snapshot,
    decayed_hits,
    has_room,
    superseded,
    surplus,
)
from evoke_proxy.engine.storage.file_removal import FileRemover
from evoke_proxy.engine.storage.index_cache import SnapshotIndexCache
from evoke_proxy.engine.storage.index_thread import IndexThread
from evoke_proxy.errors import ConfigError, IndexUnusable, SnapshotUnusable

_log = logging.getLogger(__name__)
_KEY_SETTING = "snapshots.key_file"


def disk_format(key_file: str) -> DiskFormat:
    """Return the format that the file of a key asks for; unencrypted when it is "".

    Raises ConfigError when the file holds no key.
    """
    if not key_file:
        return DiskFormat()
    try:
        key = bytes.fromhex(read_token(Path(key_file), _KEY_SETTING))
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigError(f"{_KEY_SETTING}: {key_file} must hold 64 hexadecimal digits")
    return EncryptedFormat(key)


@dataclass(frozen=True, slots=True)
class SnapshotLabel:
    """What a new snapshot is of."""

    tenant: str
    # Identifies the model and the layout of its cache.
    fingerprint: str
    # The conversation, or the branch of one, that it belongs to.
    branch: str
    # Where in the conversation it was taken: USER or STEP.
    kind: str
    # Estimated seconds to decode its tokens.
    prefill_s: float


class SnapshotRepository:
    """Stores snapshots and session records; call `open` first and `close` at the end.

    A thread makes the changes of the index one after the other. What is removed or marked changes
    in memory at once, and in the index soon. Plain methods that read or write records block until
    that is done: they are for commands, and requests use the coroutines.
    """

    def __init__(self, config: SnapshotsConfig, metrics: Metrics | None = None) -> None:
        self._bounds = Bounds.of(config)
        self._metrics = metrics or Metrics()
        self._format, self._is_shared = disk_format(config.key_file), config.shared
        self.files = SnapshotFiles(Path(config.directory), self._format)
        self.clock = SteadyClock()
        self._opened: tuple[SnapshotIndex, SnapshotIndexCache] | None = None
        self._removal = FileRemover()
        self._index_thread = IndexThread(self._metrics)
        self._free_bytes: int | None = None

    def open(self, claim: bool = True) -> None:
        """Open the directory and make files and index agree; ConfigError when it is unusable.

        With `claim` no other process may change the directory, unless it is shared.
        """
        self.files.prepare()
        is_alone = claim and self.files.claim(self._is_shared)
        try:
            index = self._open_index(is_alone)
            try:
                if is_alone:
                    self._metrics.snapshots_bad.labels(reason="row").inc(index.drop_bad())
                self.clock.advance_to(index.median_used())
                if is_alone:
                    index.limit_used(self.clock.now())
                self._opened = index, SnapshotIndexCache(index)
            except BaseException:
                index.close()
                raise
            if is_alone:
                self._reconcile()
            if self._is_shared:
                index.share()
                self.files.share()
        except BaseException:
            self.close()
            raise

    def _open_index(self, is_alone: bool) -> SnapshotIndex:
        """Open the index; a damaged one is set aside, and all that it lists is lost."""
        path = self.files.directory / INDEX
        try:
            return SnapshotIndex(path, self._format)
        except IndexUnusable as error:
            if not is_alone:
                raise ConfigError(f"snapshots.directory: {error}") from error
            _log.error("the index is set aside, nothing of before is used: %s", error)
        self._metrics.snapshots_bad.labels(reason="index").inc()
        self.files.index_aside()
        return SnapshotIndex(path, self._format)

    def close(self) -> None:
        """Finish all changes and release the directory."""
        self._removal.close()
        self._index_thread.close()
        if self._opened is not None:
            self._index.close()
        self.files.unlock()

    def adjust(self, config: SnapshotsConfig) -> None:
        """Apply other limits at once; the directory stays the same."""
        self._bounds = Bounds.of(config)
        self.trim()

    @property
    def _index(self) -> SnapshotIndex:
        return self._require_open()[0]

    @property
    def _cache(self) -> SnapshotIndexCache:
        return self._require_open()[1]

    def _require_open(self) -> tuple[SnapshotIndex, SnapshotIndexCache]:
        if self._opened is None:
            raise RuntimeError("the snapshot repository is not open")
        return self._opened

    @property
    def is_busy(self) -> bool:
        """Whether files are being removed, or changes are on their way into the index."""
        return self._removal.is_busy or self._index_thread.is_busy

    @property
    def snapshots(self) -> Collection[Snapshot]:
        """All snapshots, the latest used first as of the latest reading of the index."""
        return self._cache.items.values()

    async def refresh(self) -> None:
        """Read what other processes have changed, and how much room the disk has."""
        await self._cache.refresh()
        await self._measure_room()

    def of(self, tenant: str, fingerprint: str) -> list[Snapshot]:
        """Return the snapshots of a tenant that a server of this fingerprint can restore."""
        owner = (tenant, fingerprint)
        return [item for item in self.snapshots if (item.tenant, item.fingerprint) == owner]

    def has_room(self, tenant: str, n_bytes: float) -> bool:
        """Return whether the limits allow another snapshot of this size for a tenant."""
        free_bytes = self._room()
        return has_room(self.snapshots, self._bounds, tenant, int(n_bytes), free_bytes)

    async def _measure_room(self) -> None:
        """Ask the disk how much room it has; one that hangs delays this request only."""
        try:
            self._free_bytes = await asyncio.to_thread(self.files.free_bytes)
        except OSError as error:  # a write will fail, too, and is counted then
            _log.debug("the disk does not say how much room it has: %s", error)

    def _room(self) -> int:
        """The room that the disk had when it was asked last."""
        if self._free_bytes is None:
            self._free_bytes = self.files.free_bytes()
        return self._free_bytes

    @staticmethod
    def new_part() -> str:
        """Return a new name for a file that llama-server writes."""
        return uuid.uuid4().hex[:20] + PART

    async def add(self, part: str, n_bytes: int, tokens: Tokens, label: SnapshotLabel) -> Snapshot:
        """Make a snapshot of a file that llama-server has written; others may be deleted for it.

        Raises SnapshotUnusable when the file is not of `n_bytes` and these tokens, or is useless;
        the file is deleted then.
        """
        id, now = part.removesuffix(PART), self.clock.now()

        def seal() -> tuple[Sealed, bytes]:
            return self.files.seal(part, id + SEALED, n_bytes, tokens), pack(tokens)

        sealed, packed = await asyncio.to_thread(seal)
        new = Snapshot(
            id=id,
            tenant=label.tenant,
            fingerprint=label.fingerprint,
            branch=label.branch,
            kind=label.kind,
            n_bytes=sealed.n_bytes,
            checksum=sealed.checksum,
            prefill_s=label.prefill_s,
            created=now,
            used=now,
            tokens=tokens,
        )
        try:
            await self._index_thread.run(self._index.add, new, packed)
        except SnapshotUnusable:
            self._removal.submit(self.files.discard, _file_name(new))
            await self.wait_for_deletions()
            raise
        self._cache.put(new)
        for old in superseded(self.snapshots, new):
            self.delete(old, "superseded")
        await self._measure_room()
        self.trim()
        await self.wait_for_deletions()
        return new

    async def verify(self, snapshot: Snapshot) -> None:
        """Check the file of a snapshot; raises SnapshotUnusable and sets it aside when damaged."""
        try:
            await asyncio.to_thread(
                self.files.verify, _file_name(snapshot), snapshot.n_bytes, snapshot.checksum
            )
        except SnapshotUnusable as error:
            self.set_aside(snapshot, error.reason)
            await self.wait_for_deletions()
            raise

    @asynccontextmanager
    async def decrypted_file(self, snapshot: Snapshot) -> AsyncIterator[str]:
        """Provide the name of a file that llama-server can restore, within the context.

        Raises SnapshotUnusable when it cannot be decrypted; the snapshot is set aside then, unless
        the disk has no room for what it is decrypted to.
        """
        try:
            name = await asyncio.to_thread(self.files.decrypt, _file_name(snapshot))
        except SnapshotUnusable as error:
            if error.reason == "disk":
                self.end_restore(snapshot, useful=False)
            else:
                self.set_aside(snapshot, error.reason)
            raise
        try:
            yield name
        finally:
            if name != _file_name(snapshot):
                self._removal.submit(self.files.discard, name)

    async def begin_restore(self, snapshot: Snapshot) -> None:
        """Mark a snapshot as suspect until `end_restore`: it is not tried again after a crash.

        Raises SnapshotUnusable when the disk does not take the mark.
        """
        index, id = self._index, snapshot.id
        await self._index_thread.run(lambda: index.mark(id, suspect=True))
        self._cache.mark(id, suspect=True)

    def end_restore(self, snapshot: Snapshot, useful: bool) -> None:
        """Note that llama-server has survived a restore, and whether it saved decoding."""
        current, now = self._cache.items.get(snapshot.id), self.clock.now()
        if current is None:  # deleted meanwhile
            return
        hits = decayed_hits(current, now, self._bounds.half_life_s) + useful
        self._mark(snapshot, suspect=False, used=now if useful else current.used, hits=hits)

    def set_aside(self, snapshot: Snapshot, reason: str) -> None:
        """Remove a snapshot from the index and keep its file for inspection."""
        _log.warning("snapshot %s set aside: %s", snapshot.id, reason)
        self._metrics.snapshots_bad.labels(reason=reason).inc()
        self._remove(snapshot)
        self._removal.submit(self.files.set_aside, _file_name(snapshot))

    def delete(self, snapshot: Snapshot, reason: str) -> None:
        """Delete a snapshot: its row first, since a file without a row is deleted at start."""
        self._metrics.snapshots_evicted.labels(reason=reason).inc()
        self._remove(snapshot)
        self._removal.submit(self.files.discard, _file_name(snapshot))

    def pin(self, snapshot: Snapshot, pinned: bool) -> None:
        """Pin or unpin a snapshot; a pinned one is never deleted for room, age or a newer one."""
        self._mark(snapshot, pinned=pinned)

    def discard(self, part: str, may_be_written: bool = False) -> None:
        """Delete a file of llama-server that becomes no snapshot.

        One that `may_be_written` still is deleted once more with each later one, and at start.
        """
        self._removal.submit(self.files.discard, part, repeat=may_be_written)
        self._removal.repeat_all(self.files.discard)

    def trim(self) -> None:
        """Delete the least valuable snapshots until the limits are kept."""
        now = self.clock.now()
        for snapshot, reason in surplus(self.snapshots, self._bounds, self._room(), now):
            self.delete(snapshot, reason)
        self._removal.repeat_all(self.files.discard)
        latest = self._cache.latest
        self._metrics.snapshots.set(len(latest))
        self._metrics.snapshot_bytes.set(sum(item.n_bytes for item in latest))

    def summary(self) -> Mapping[str, Any]:
        """Return the number of snapshots and of their bytes, for readiness checks."""
        return {"snapshots": len(self.snapshots), "bytes": sum(i.n_bytes for i in self.snapshots)}

    def records(self, id: str | None = None) -> Sequence[Record]:
        """Return all records or those of one id, the latest used first; deletes those too old."""
        found = self._index_thread.submit(self._index.records, id, reads=True)
        return self._without_expired(found.result())

    async def read_records(self) -> Sequence[Record]:
        """Return all records, as `records` does, for the event loop."""
        records = await self._index_thread.run(self._index.records, reads=True)
        return self._without_expired(records)

    def _without_expired(self, records: Sequence[Record]) -> Sequence[Record]:
        oldest = self.clock.now() - self._bounds.max_age_s
        for record in (record for record in records if record.used < oldest):
            self.remove_record(record.id)
        return [record for record in records if record.used >= oldest]

    async def record_owners(self) -> Sequence[Owner]:
        """Return the tenant and session of each record, after all changes given before."""
        return await self._index_thread.run(self._index.owners, reads=True)

    def put_record(self, record: Record) -> None:
        """Write a record, in place of the one of its id."""
        self._index_thread.submit(self._index.put_record, record).result()

    async def write_record(self, record: Record) -> None:
        """Write a record, as `put_record` does, for the event loop.

        Raises SnapshotUnusable, and changes nothing, when the disk does not take it.
        """
        await self._index_thread.run(self._index.put_record, record)

    def change_record(self, id: str, change: Callable[[Record], Record]) -> None:
        """Replace a record soon by what `change` returns; a ValueError that it raises is logged."""
        index = self._index

        def apply() -> None:
            for record in index.records(id):
                try:
                    index.put_record(change(record))
                except ValueError as error:
                    _log.warning("the record of session %s is left as it is: %s", id, error)

        self._index_thread.enqueue(apply)

    def remove_record(self, id: str) -> None:
        """Delete a record and its parts soon; after a failure `record_owners` still has it."""
        index = self._index
        self._index_thread.enqueue(lambda: index.remove_record(id))

    async def wait_for_deletions(self) -> None:
        """Wait until the files given before are removed, and the index says so."""
        await self._removal.wait_async()
        await self._index_thread.run(lambda: None, reads=True)

    def forget_aside(self) -> None:
        """Delete soon what was set aside."""
        self._removal.submit(lambda _: self.files.forget_aside(), "what was set aside")

    def _reconcile(self) -> None:
        """Make files and rows agree: rows without a file go, files without a row, and suspects."""
        sizes = dict(self.files.sizes())
        for item in list(self._cache.latest):
            size = sizes.pop(_file_name(item), None)
            if size is None:
                self.set_aside(item, "missing")
            elif size != item.n_bytes:
                self.set_aside(item, "size")
            elif item.suspect:
                self.set_aside(item, "suspect")
        for name in sizes:
            self.files.discard(name)
        self.trim()
        self._removal.wait()
        self._index_thread.submit(lambda: None, reads=True).result()

    def _mark(self, snapshot: Snapshot, **values: float) -> None:
        """Change fields of a snapshot, and no others, which another process may have changed.

        When the disk does not take it, the next process does not trust the snapshot; this one may.
        """
        index, id = self._index, snapshot.id
        self._index_thread.enqueue(lambda: index.mark(id, **values))
        self._cache.mark(id, **values)

    def _remove(self, snapshot: Snapshot) -> None:
        """Remove a row; the file goes even if the disk does not take that."""
        index, id = self._index, snapshot.id
        self._index_thread.enqueue(lambda: index.remove(id))
        self._cache.remove(id)


def _file_name(snapshot: Snapshot) -> str:
    return snapshot.id + SEALED
