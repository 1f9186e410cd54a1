"""Stores the snapshots and session records of one directory: files, and an index of them."""

from __future__ import annotations

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
    Place,
    Snapshot,
    has_room,
    superseded,
    surplus,
)
from evoke_proxy.engine.storage.index_cache import SnapshotIndexCache
from evoke_proxy.engine.storage.threads import FileRemover, IndexThread
from evoke_proxy.errors import ConfigError, IndexUnusable, SnapshotUnusable
from evoke_proxy.thread_pools import DISK, run_in

_log = logging.getLogger(__name__)
_KEY_SETTING = "snapshots.key_file"
# To verify a smaller file takes less time than to make sure that it can be read meanwhile.
_LARGE_BYTES = 16 << 20


def disk_format(key_file: str) -> DiskFormat:
    """The format of files and rows: encrypted with the key in `key_file`, or plain when it is "".

    Raises ConfigError when the file contains no key.
    """
    return encrypted_format(key_file, _KEY_SETTING) if key_file else DiskFormat()


def encrypted_format(key_file: str, setting: str) -> EncryptedFormat:
    """The format that encrypts with the key in a file; ConfigError when that contains no key.

    `setting` is the setting or option that names the file, for errors.
    """
    try:
        key = bytes.fromhex(read_token(Path(key_file), setting))
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigError(f"{setting}: {key_file} must hold 64 hexadecimal digits")
    return EncryptedFormat(key)


@dataclass(frozen=True, slots=True)
class SnapshotLabel:
    """Describes a new snapshot."""

    tenant: str
    # Identifies the model and the layout of its cache.
    fingerprint: str
    # The conversation, or the branch of one, that it belongs to.
    branch: str
    # Where in the conversation it ends: USER, STEP, PREFIX or WHOLE.
    kind: str
    # Estimated seconds to decode its tokens.
    prefill_s: float
    # What it replaces; None for all that it begins with.
    place: Place | None = None


class SnapshotRepository:
    """Stores snapshots and session records; call `open` first and `close` at the end.

    A thread makes the changes of the index one after the other. Removing or marking a snapshot
    takes effect in memory at once, and in the index soon after. Methods for records block until
    the disk has answered, and are for commands; requests use those that are coroutines.
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
        self._left_unverified: Mapping[str, int] = {}

    def open(self, claim: bool = True) -> None:
        """Open the directory and reconcile files and index; ConfigError when it is unusable.

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
            self._left_unverified = self.files.unverified()
            if is_alone:
                self._reconcile()
            if self._is_shared:
                index.share()
                self.files.share()
        except BaseException:
            self.close()
            raise

    def _open_index(self, is_alone: bool) -> SnapshotIndex:
        """Open the index; a damaged one is set aside, and the snapshots that it lists are lost."""
        path = self.files.directory / INDEX
        try:
            return SnapshotIndex(path, self._format)
        except IndexUnusable as error:
            if not is_alone:
                raise ConfigError(f"snapshots.directory: {error}") from error
            _log.error(
                "the index is unusable and was set aside, earlier snapshots are lost: %s", error
            )
        self._metrics.snapshots_bad.labels(reason="index").inc()
        self.files.quarantine_index()
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
        """Whether files are being removed, or changes of the index are queued."""
        return self._removal.is_busy or self._index_thread.is_busy

    @property
    def snapshots(self) -> Collection[Snapshot]:
        """All snapshots; at the latest read of the index, the most recently used came first."""
        return self._cache.items.values()

    async def refresh(self) -> None:
        """Read the changes of other processes, and the free space of the disk."""
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

    @property
    def lacking_space(self) -> str:
        """Why the disk had no space for any snapshot when that was read last; "" when it had."""
        deletable = sum(item.n_bytes for item in self.snapshots if not item.pinned)
        free_bytes, least = self._room(), self._bounds.min_free_bytes
        if free_bytes + deletable >= least:
            return ""
        return (
            f"the disk of {self.files.directory} has {free_bytes >> 20} MiB free, and"
            f" snapshots.min_free_mib keeps {least >> 20} MiB free"
        )

    async def _measure_room(self) -> None:
        """Read the free space of the disk; a disk that hangs delays only this request."""
        try:
            self._free_bytes = await run_in(DISK, self.files.free_bytes)
        except OSError as error:  # a write will fail, too, and is counted then
            _log.debug("the free space of the disk cannot be read: %s", error)

    def _room(self) -> int:
        """The free bytes of the disk when they were last read."""
        if self._free_bytes is None:
            self._free_bytes = self.files.free_bytes()
        return self._free_bytes

    @staticmethod
    def new_part() -> str:
        """Return a new name for a file that llama-server writes."""
        return uuid.uuid4().hex[:20] + PART

    async def add(self, part: str, n_bytes: int, tokens: Tokens, label: SnapshotLabel) -> Snapshot:
        """Make a snapshot of a file of llama-server; may delete others to make room.

        Raises SnapshotUnusable, and deletes the file, when it has another size than `n_bytes`,
        other tokens, or would save no decoding.
        """
        id, now = part.removesuffix(PART), self.clock.now()

        def seal() -> tuple[Sealed, bytes]:
            return self.files.seal(part, id + SEALED, n_bytes, tokens), pack(tokens)

        sealed, packed = await run_in(DISK, seal)
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
        for old in superseded(self.snapshots, new, label.place):
            self.delete(old, "superseded")
        await self._measure_room()
        self.trim()
        await self.wait_for_deletions()
        return new

    async def verify(self, snapshot: Snapshot, follow: bool = False) -> None:
        """Verify the file of a snapshot; sets a damaged one aside and raises SnapshotUnusable.

        With `follow`, llama-server reads the file at the same time.
        """
        sealed = Sealed(snapshot.n_bytes, snapshot.checksum)
        try:
            await run_in(DISK, self.files.verify, _file_name(snapshot), sealed, follow)
        except SnapshotUnusable as error:
            self.set_aside(snapshot, error.reason)
            await self.wait_for_deletions()
            raise

    async def may_restore_unverified(self, snapshot: Snapshot) -> bool:
        """Return whether llama-server may read the file of a snapshot while it is verified.

        True for large, unencrypted files of which only rows can have changed: llama-server then
        cannot fail because of damage, and the slot can be emptied afterwards.
        """
        if snapshot.n_bytes < _LARGE_BYTES or self._format.key_id:
            return False
        sealed = Sealed(snapshot.n_bytes, snapshot.checksum)
        return await run_in(DISK, self.files.has_sound_frame, _file_name(snapshot), sealed)

    @property
    def slots_left_unverified(self) -> set[int]:
        """Slots that another process may have filled from a file without verifying it.

        The process may have known the server by another address, so they are those of any server.
        """
        return set(self._left_unverified.values())

    def clear_unverified(self, server: str, slot: int) -> None:
        """Delete the records that a slot is unverified; blocks on the disk."""
        self.files.unmark_unverified(server, slot)
        if not self._is_shared:  # otherwise those of other processes may still be needed
            for name in [name for name, of in self._left_unverified.items() if of == slot]:
                self.files.discard(name)

    @asynccontextmanager
    async def decrypted_file(self, snapshot: Snapshot) -> AsyncIterator[str]:
        """Provide the name of a file that llama-server can restore, within the context.

        Raises SnapshotUnusable when it cannot be decrypted; the snapshot is set aside then, unless
        the reason is that the disk is full.
        """
        try:
            name = await run_in(DISK, self.files.decrypt, _file_name(snapshot))
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
        """Mark a snapshot as suspect until `end_restore`: it is not restored again after a crash.

        Raises SnapshotUnusable when the mark cannot be written.
        """
        index, id = self._index, snapshot.id
        await self._index_thread.run(lambda: index.mark(id, suspect=True))
        self._cache.mark(id, suspect=True)

    def end_restore(self, snapshot: Snapshot, useful: bool) -> None:
        """Record that a restore has ended without a crash, and whether it saved decoding."""
        current, now = self._cache.items.get(snapshot.id), self.clock.now()
        if current is None:  # deleted meanwhile
            return
        used, hits = (now, current.hits + 1) if useful else (current.used, current.hits)
        self._mark(snapshot, suspect=False, used=used, hits=hits)

    def set_aside(self, snapshot: Snapshot, reason: str) -> None:
        """Remove a snapshot from the index, and move its file to quarantine for inspection.

        Does nothing with one that was deleted since it was chosen.
        """
        if snapshot.id not in self._cache.items:
            return
        _log.warning("snapshot %s was set aside: %s", snapshot.id, reason)
        self._metrics.snapshots_bad.labels(reason=reason).inc()
        self._remove(snapshot)
        self._removal.submit(self.files.quarantine, _file_name(snapshot))

    def delete(self, snapshot: Snapshot, reason: str) -> None:
        """Delete a snapshot: its row first, because a file without a row is deleted at start."""
        self._metrics.snapshots_evicted.labels(reason=reason).inc()
        self._remove(snapshot)
        self._removal.submit(self.files.discard, _file_name(snapshot))

    def pin(self, snapshot: Snapshot, pinned: bool) -> None:
        """Pin or unpin a snapshot; a pinned one is never deleted for room, age or a newer one."""
        self._mark(snapshot, pinned=pinned)

    def discard(self, part: str, may_be_written: bool = False) -> None:
        """Delete a file of llama-server that does not become a snapshot.

        A file that `may_be_written` still is deleted again with later files, and at start.
        """
        self._removal.submit(self.files.discard, part, repeat=may_be_written)
        self._removal.repeat_all(self.files.discard)

    def trim(self) -> None:
        """Delete the least recently used snapshots until the limits are met."""
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

    @property
    def described(self) -> str:
        """The directory, and how much is stored there, in one line."""
        summary = self.summary()
        stored = f"{summary['snapshots']} snapshots, {summary['bytes'] >> 20} MiB"
        return f"snapshots in {self.files.directory}: {stored}"

    def records(self, id: str | None = None) -> Sequence[Record]:
        """Return all records, or those of one id; the most recently used first.

        Deletes expired records.
        """
        records = self._index_thread.submit(self._index.records, id, reads=True)
        return self._without_expired(records.result())

    async def read_records(self) -> Sequence[Record]:
        """As `records`, without blocking the event loop; returns all records."""
        records = await self._index_thread.run(self._index.records, reads=True)
        return self._without_expired(records)

    def _without_expired(self, records: Sequence[Record]) -> Sequence[Record]:
        oldest = self.clock.now() - self._bounds.max_age_s
        for record in (record for record in records if record.used < oldest):
            self.remove_record(record.id)
        return [record for record in records if record.used >= oldest]

    async def record_owners(self) -> Sequence[Owner]:
        """Return the tenant and session of each record, after all earlier changes."""
        return await self._index_thread.run(self._index.owners, reads=True)

    def put_record(self, record: Record) -> None:
        """Write a record; replaces the record with the same id."""
        self._index_thread.submit(self._index.put_record, record).result()

    async def write_record(self, record: Record) -> None:
        """As `put_record`, without blocking the event loop.

        Raises SnapshotUnusable, and changes nothing, when the record cannot be written.
        """
        await self._index_thread.run(self._index.put_record, record)

    def change_record(self, id: str, change: Callable[[Record], Record]) -> None:
        """Replace a record soon by the result of `change`; logs a ValueError of `change`."""
        index = self._index

        def apply() -> None:
            for record in index.records(id):
                try:
                    index.put_record(change(record))
                except ValueError as error:
                    _log.warning("the record of session %s cannot be changed: %s", id, error)

        self._index_thread.enqueue(apply)

    def remove_record(self, id: str) -> None:
        """Delete a record and its parts soon; if that fails, `record_owners` still lists it."""
        index = self._index
        self._index_thread.enqueue(lambda: index.remove_record(id))

    async def wait_for_deletions(self) -> None:
        """Wait until all earlier removals have ended, in the directory and in the index."""
        await self._removal.wait_async()
        await self._index_thread.run(lambda: None, reads=True)

    def forget_aside(self) -> None:
        """Delete the quarantined files soon."""
        self._removal.submit(lambda _: self.files.delete_quarantined(), "quarantined files")

    def _reconcile(self) -> None:
        """Remove rows without a file, files without a row or half written, and suspects."""
        self.files.delete_parts()
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
        """Change only these fields of a snapshot: another process may have changed other fields.

        When the change cannot be written, it is in effect in this process only.
        """
        index, id = self._index, snapshot.id
        self._index_thread.enqueue(lambda: index.mark(id, **values))
        self._cache.mark(id, **values)

    def _remove(self, snapshot: Snapshot) -> None:
        """Remove the row of a snapshot; the caller removes the file even if that fails."""
        index, id = self._index, snapshot.id
        self._index_thread.enqueue(lambda: index.remove(id))
        self._cache.remove(id)


def _file_name(snapshot: Snapshot) -> str:
    return snapshot.id + SEALED
