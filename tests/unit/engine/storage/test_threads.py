"""The index of snapshots and records does not block the event loop."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from index_fixtures import add_snapshot, open_repository

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.adapters.snapshot_files import INDEX
from evoke_proxy.adapters.snapshot_index import Record
from evoke_proxy.config import Config, SnapshotsConfig
from evoke_proxy.core.snapshots.disk_format import DiskFormat
from evoke_proxy.engine.admin.erasure import SessionEraser
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository
from evoke_proxy.errors import SnapshotUnusable

BLOCKED_S = 2.0


def record(id: str, tenant: str = "t") -> Record:
    return Record(id, tenant, time.time(), id.encode() * 100)


def test_changes_wait_for_another_process_off_the_loop(tmp_path: Path) -> None:
    """While another process locks the index for seconds, the event loop keeps running."""

    async def changed(repository: SnapshotRepository) -> float:
        snapshot = await add_snapshot(repository)
        other = sqlite3.connect(tmp_path / INDEX, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        start, longest, last = time.monotonic(), 0.0, time.monotonic()
        writing = asyncio.get_running_loop().create_task(repository.write_record(record("new")))
        repository.end_restore(snapshot, useful=True)
        repository.pin(snapshot, True)
        repository.remove_record("old")
        while time.monotonic() - start < BLOCKED_S:
            assert [item.id for item in repository.snapshots] == [snapshot.id]
            await asyncio.sleep(0.005)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        assert not writing.done(), "the index must be locked while the loop is measured"
        other.execute("COMMIT")
        other.close()
        await writing
        await repository.wait_for_deletions()
        return longest

    with open_repository(tmp_path) as repository:
        repository.put_record(record("old"))
        assert asyncio.run(changed(repository)) < BLOCKED_S / 2
        assert [found.id for found in repository.records()] == ["new"]
    with open_repository(tmp_path) as repository:
        (snapshot,) = repository.snapshots
        assert snapshot.pinned and snapshot.hits > 0


def test_deleting_reads_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of a record is known without decrypting it."""
    opened: list[bytes] = []
    whole = DiskFormat.decode_row

    def counted(self: DiskFormat, stored: bytes, aad: bytes) -> bytes:
        opened.append(aad)
        return whole(self, stored, aad)

    engine = build_router(
        Config(snapshots=SnapshotsConfig(directory=str(tmp_path), min_free_mib=0))
    )
    repository = engine.server.strategies.snapshots.repository

    async def deleted() -> None:
        async with engine.shared, engine.server.strategies.snapshots:
            for id in ("mine", "mine#1", "mine#2", "mineral", "other#1"):
                tenant = "t" if id.startswith("mine") else "u"
                await repository.write_record(record(id, tenant))
            monkeypatch.setattr(DiskFormat, "decode_row", counted)
            done = await SessionEraser(engine.served_models[0]).delete(
                [], lambda _, session: session == "mine"
            )
            assert not done["left"] and not opened
            assert {own.session for own in await repository.record_owners()} == {"mineral", "other"}
            done = await SessionEraser(engine.served_models[0]).wipe("t")
            assert "records on disk" not in done["left"] and not opened
            assert {own.session for own in await repository.record_owners()} == {"other"}

    asyncio.run(deleted())


def test_the_free_space_of_a_disk_that_hangs_is_read_off_the_loop(tmp_path: Path) -> None:
    readers: list[int] = []

    async def used(repository: SnapshotRepository) -> None:
        await repository.refresh()
        await add_snapshot(repository)
        repository.trim()
        assert repository.has_room("t", 1.0)

    with open_repository(tmp_path) as repository:
        read = repository.files.free_bytes

        def recorded() -> int:
            readers.append(threading.get_ident())
            return read()

        repository.files.free_bytes = recorded  # type: ignore[method-assign]
        asyncio.run(used(repository))
    assert len(readers) >= 2 and threading.get_ident() not in readers


def test_a_disk_that_refuses_changes_is_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()

    async def refused(repository: SnapshotRepository) -> None:
        repository._index._db.execute("PRAGMA query_only = 1")
        with pytest.raises(SnapshotUnusable):
            await repository.write_record(record("new"))
        repository.remove_record("old")
        repository.change_record("old", lambda found: found)
        await repository.wait_for_deletions()
        assert [found.id for found in await repository.read_records()] == ["old"]
        repository._index._db.execute("PRAGMA query_only = 0")
        await repository.write_record(record("new"))

    with open_repository(tmp_path, metrics) as repository:
        repository.put_record(record("old"))
        asyncio.run(refused(repository))
        assert {found.id for found in repository.records()} == {"old", "new"}
    assert metrics.registry.get_sample_value("evoke_index_failures_total") == 3
    assert len([line for line in caplog.messages if "cannot be written" in line]) == 1
