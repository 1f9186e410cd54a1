"""The snapshots of one directory: files and index as one, within bounds, verified."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from evoke_proxy.adapters.cipher import EncryptedFormat
from evoke_proxy.adapters.clock import SteadyClock
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.adapters.secret_files import read_token
from evoke_proxy.adapters.snapshot_files import INDEX, PART, WHOLE, Sealed, SnapshotFiles
from evoke_proxy.adapters.snapshot_index import Owner, Record, SnapshotIndex, pack
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.snapshots.disk_format import DiskFormat
from evoke_proxy.core.snapshots.snapshots import (
    Bounds,
    Snapshot,
    has_room,
    hits_at,
    superseded,
    surplus,
)
from evoke_proxy.engine.storage.file_removal import FileRemover
from evoke_proxy.engine.storage.index_cache import SnapshotIndexCache
from evoke_proxy.errors import ConfigError, IndexUnusable, SnapshotUnusable

_log = logging.getLogger(__name__)
T = TypeVar("T")
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
    """What a snapshot to be is of, and where in its conversation it stands."""

    tenant: str
    fingerprint: str
    branch: str
    kind: str
    prefill_s: float


class SnapshotRepository:
    """Use `open` before all else, `close` at the end; `claim` it to be the one that changes it.

    Changes of the index are made one after the other by a thread. What is removed or marked is so
    here at once, and in the index soon. A plain method that reads or writes records blocks until
    that is done: it is for commands; requests use the coroutines.
    """

    def __init__(self, config: SnapshotsConfig, metrics: Metrics | None = None) -> None:
        self._bounds = Bounds.of(config)
        self._metrics = metrics or Metrics()
        self._format, self._shared = disk_format(config.key_file), config.shared
        self.files = SnapshotFiles(Path(config.directory), self._format)
        self._store: SnapshotIndex | None = None
        self._read: SnapshotIndexCache | None = None
        self._sweeper = FileRemover()
        self.clock = SteadyClock()
        self._thread = ThreadPoolExecutor(1, "index")
        self._latest: Future[Any] | None = None
        self._failing = False
        self._free: int | None = None

    def open(self, claim: bool = True) -> None:
        """Take over what is there, files and index made to agree; ConfigError when unusable."""
        self.files.prepare()
        alone = claim and self.files.claim(self._shared)
        try:
            self._store = self._opened(alone)
            if alone:
                self._metrics.snapshots_bad.labels(reason="row").inc(self._store.drop_bad())
            self.clock.advance_to(self._store.median_used())
            if alone:
                self._store.limit_used(self.clock.now())
            self._read = SnapshotIndexCache(self._store)
            if alone:
                self._reconcile()
            if self._shared:
                self._store.share()
                self.files.share()
        except BaseException:
            self.close()
            raise

    def _opened(self, alone: bool) -> SnapshotIndex:
        """The index; a damaged one is set aside, and with it all that it knew of."""
        path = self.files.directory / INDEX
        try:
            return SnapshotIndex(path, self._format)
        except IndexUnusable as error:
            if not alone:
                raise ConfigError(f"snapshots.directory: {error}") from error
            _log.error("the index is set aside, nothing of before is used: %s", error)
        self._metrics.snapshots_bad.labels(reason="index").inc()
        self.files.index_aside()
        return SnapshotIndex(path, self._format)

    def close(self) -> None:
        """Let another process have it."""
        self._sweeper.close()
        self._thread.shutdown()
        if self._store is not None:
            self._store.close()
        self.files.free()

    def adjust(self, config: SnapshotsConfig) -> None:
        """Other bounds, at once; the directory stays what it was."""
        self._bounds = Bounds.of(config)
        self.trim()

    @property
    def _index(self) -> SnapshotIndex:
        assert self._store is not None, "it is not open"
        return self._store

    @property
    def _known(self) -> SnapshotIndexCache:
        assert self._read is not None, "it is not open"
        return self._read

    @property
    def is_busy(self) -> bool:
        """Whether files are on their way out, or changes on their way into the index."""
        return self._sweeper.busy or (self._latest is not None and not self._latest.done())

    @property
    def snapshots(self) -> Collection[Snapshot]:
        """All of them, the latest used first as of the last look at the index."""
        return self._known.items.values()

    async def refresh(self) -> None:
        """Before the snapshots are looked through: read what others have done to them, and how
        much room the disk has."""
        await self._known.refresh()
        await self._measure()

    def of(self, tenant: str, fingerprint: str) -> list[Snapshot]:
        """Those that may be restored for a tenant on a server of this fingerprint."""
        mine = (tenant, fingerprint)
        return [item for item in self.snapshots if (item.tenant, item.fingerprint) == mine]

    def has_room(self, tenant: str, n_bytes: float) -> bool:
        """Whether one more of this size can be kept for a tenant at all."""
        return has_room(self.snapshots, self._bounds, tenant, int(n_bytes), self._free_bytes())

    async def _measure(self) -> None:
        """Ask the disk how much room it has; one that hangs holds up this request only."""
        try:
            self._free = await asyncio.to_thread(self.files.free_bytes)
        except OSError as error:  # a write will fail, too, and is counted then
            _log.debug("the disk does not say how much room it has: %s", error)

    def _free_bytes(self) -> int:
        """The room that the disk had when it was asked last."""
        if self._free is None:
            self._free = self.files.free_bytes()
        return self._free

    @staticmethod
    def new_part() -> str:
        """The name of a file that llama-server is to write next."""
        return uuid.uuid4().hex[:20] + PART

    async def add(self, part: str, n_bytes: int, tokens: Tokens, label: SnapshotLabel) -> Snapshot:
        """What llama-server has just written becomes a snapshot; others may go for it.

        Raises SnapshotUnusable when it is not what it should be; nothing is left of it then.
        """
        id, now = part.removesuffix(PART), self.clock.now()

        def seal() -> tuple[Sealed, bytes]:
            return self.files.seal(part, id + WHOLE, n_bytes, tokens), pack(tokens)

        sealed, packed = await asyncio.to_thread(seal)
        new = Snapshot(
            *(id, label.tenant, label.fingerprint, label.branch, label.kind),
            *(sealed.n_bytes, sealed.checksum, label.prefill_s, now, now),
            tokens=tokens,
        )
        try:
            await self._written(self._index.add, new, packed)
        except SnapshotUnusable:
            self._sweeper.sweep(self.files.discard, _name(new))
            await self.wait_for_deletions()
            raise
        self._known.put(new)
        for old in superseded(self.snapshots, new):
            self.delete(old, "superseded")
        await self._measure()
        self.trim()
        await self.wait_for_deletions()
        return new

    async def verify(self, snapshot: Snapshot) -> None:
        """Raises SnapshotUnusable, and sets it aside, unless its file is what was saved."""
        saved = snapshot.n_bytes, snapshot.checksum
        try:
            await asyncio.to_thread(self.files.verify, _name(snapshot), *saved)
        except SnapshotUnusable as error:
            self.set_aside(snapshot, error.reason)
            await self.wait_for_deletions()
            raise

    @asynccontextmanager
    async def decrypted_file(self, snapshot: Snapshot) -> AsyncIterator[str]:
        """The file that llama-server is to restore. Raises SnapshotUnusable, and sets it aside,
        when it cannot be decrypted."""
        try:
            name = await asyncio.to_thread(self.files.lend, _name(snapshot))
        except SnapshotUnusable as error:
            if error.reason == "disk":  # no room for what it is decrypted: it is sound
                self.end_restore(snapshot, useful=False)
            else:
                self.set_aside(snapshot, error.reason)
            raise
        try:
            yield name
        finally:
            if name != _name(snapshot):
                self._sweeper.sweep(self.files.discard, name)

    async def begin_restore(self, snapshot: Snapshot) -> None:
        """From here on it is suspect: should llama-server die of it, it is not tried again.
        Raises SnapshotUnusable when the disk does not take that note."""
        index, id = self._index, snapshot.id
        await self._written(lambda: index.mark(id, suspect=True))
        self._known.mark(id, suspect=True)

    def end_restore(self, snapshot: Snapshot, useful: bool) -> None:
        """llama-server has lived through it."""
        current, now = self._known.items.get(snapshot.id), self.clock.now()
        if current is None:  # deleted meanwhile
            return
        hits = hits_at(current, now, self._bounds.half_life_s) + useful
        self._mark(snapshot, suspect=False, used=now if useful else current.used, hits=hits)

    def set_aside(self, snapshot: Snapshot, reason: str) -> None:
        """Out of the index, its file kept for whoever wants to look at it."""
        _log.warning("snapshot %s set aside: %s", snapshot.id, reason)
        self._metrics.snapshots_bad.labels(reason=reason).inc()
        self._remove(snapshot)
        self._sweeper.sweep(self.files.set_aside, _name(snapshot))

    def delete(self, snapshot: Snapshot, reason: str) -> None:
        """Delete it, row first: a file without a row is a leaving, the reverse a lie."""
        self._metrics.snapshots_gone.labels(reason=reason).inc()
        self._remove(snapshot)
        self._sweeper.sweep(self.files.discard, _name(snapshot))

    def pin(self, snapshot: Snapshot, pinned: bool) -> None:
        """A pinned one is never deleted for room, age or a newer one."""
        self._mark(snapshot, pinned=pinned)

    def discard(self, part: str, overdue: bool = False) -> None:
        """Delete what llama-server has written and is no snapshot; what is `overdue`, and may still
        be written, again with every later one, and at the next start."""
        self._sweeper.sweep(self.files.discard, part, again=overdue)
        self._sweeper.sweep_again(self.files.discard)

    def trim(self) -> None:
        """Be within the bounds again."""
        free = self._free_bytes()
        for snapshot, reason in surplus(self.snapshots, self._bounds, free, self.clock.now()):
            self.delete(snapshot, reason)
        self._sweeper.sweep_again(self.files.discard)
        latest = self._known.latest
        self._metrics.snapshots.set(len(latest))
        self._metrics.snapshot_bytes.set(sum(item.n_bytes for item in latest))

    def summary(self) -> Mapping[str, Any]:
        """What readiness shows of it."""
        return {"snapshots": len(self.snapshots), "bytes": sum(i.n_bytes for i in self.snapshots)}

    def records(self, id: str | None = None) -> Sequence[Record]:
        """Of budgeted sessions, or of one, the latest used first; those that are too old go."""
        return self._recent(self._submit(self._index.records, id, reads=True).result())

    async def read_records(self) -> Sequence[Record]:
        """As `records`, for the event loop."""
        return self._recent(await self._written(self._index.records, reads=True))

    def _recent(self, found: Sequence[Record]) -> Sequence[Record]:
        oldest = self.clock.now() - self._bounds.max_age_s
        for record in (record for record in found if record.used < oldest):
            self.remove_record(record.id)
        return [record for record in found if record.used >= oldest]

    async def record_owners(self) -> Sequence[Owner]:
        """Whose records there are: what was asked for before this is done."""
        return await self._written(self._index.owners, reads=True)

    def put_record(self, record: Record) -> None:
        """Write a session down, instead of what was written of it before."""
        self._submit(self._index.put_record, record).result()

    async def write_record(self, record: Record) -> None:
        """As `put_record`, for the event loop. Raises SnapshotUnusable, and changes nothing, when
        the disk does not take it."""
        await self._written(self._index.put_record, record)

    def change_record(self, id: str, change: Callable[[Record], Record]) -> None:
        """Replace a record by what `change` makes of it, soon; ValueErrors of it are logged."""
        index = self._index

        def changed() -> None:
            for record in index.records(id):
                try:
                    index.put_record(change(record))
                except ValueError as error:
                    _log.warning("the record of session %s is left as it is: %s", id, error)

        self._queue(changed)

    def remove_record(self, id: str) -> None:
        """A session is not to go on; one that stays on disk all the same is still in `records`."""
        index = self._index
        self._queue(lambda: index.remove_record(id))

    def _submit(self, work: Callable[..., T], *args: Any, reads: bool = False) -> Future[T]:
        """Have the thread of the index do this behind what it was given before."""

        def run() -> T:
            try:
                result = work(*args)
            except SnapshotUnusable as error:
                self._failed(error)
                raise
            self._failing &= reads
            return result

        self._latest = self._thread.submit(run)
        return self._latest

    async def _written(self, work: Callable[..., T], *args: Any, reads: bool = False) -> T:
        """The same, waited for; it is done even if nobody waits any more."""
        return await asyncio.shield(asyncio.wrap_future(self._submit(work, *args, reads=reads)))

    def _queue(self, work: Callable[[], None]) -> None:
        """The same, where a failure is counted and logged, and changes nothing else."""
        self._submit(work).add_done_callback(_logged)

    def _failed(self, error: SnapshotUnusable) -> None:
        """Count a failed change; of a row of them the first is logged."""
        self._metrics.index_failures.inc()
        level = logging.DEBUG if self._failing else logging.WARNING
        _log.log(level, "the index of snapshots and records takes no changes now: %s", error)
        self._failing = True

    def _reconcile(self) -> None:
        """Rows without their file go, files without a row too, and whatever was being restored."""
        sizes = dict(self.files.sizes())
        for item in list(self._known.latest):
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
        self._sweeper.wait()
        self._submit(lambda: None, reads=True).result()

    def _mark(self, snapshot: Snapshot, **values: float) -> None:
        """Change these fields of it and nothing that somebody else may have changed. Should the
        disk not take it, the next process does not trust the snapshot; this one may."""
        index, id = self._index, snapshot.id
        self._queue(lambda: index.mark(id, **values))
        self._known.mark(id, **values)

    async def wait_for_deletions(self) -> None:
        """Wait until all files that go are gone, and the index says so."""
        await self._sweeper.swept()
        await self._written(lambda: None, reads=True)

    def forget_aside(self) -> None:
        """Delete what was set aside, soon."""
        self._sweeper.sweep(lambda _: self.files.forget_aside(), "what was set aside")

    def _remove(self, snapshot: Snapshot) -> None:
        """Its file goes even if the disk does not take this: a row without one is found."""
        index, id = self._index, snapshot.id
        self._queue(lambda: index.remove(id))
        self._known.remove(id)


def _logged(work: Future[None]) -> None:
    """Log what is no failure of the disk: that is logged where it is counted."""
    error = work.exception()
    if error is not None and not isinstance(error, SnapshotUnusable):
        _log.error("a change of the index failed", exc_info=error)


def _name(snapshot: Snapshot) -> str:
    return snapshot.id + WHOLE
