"""Snapshots on disk: encrypted, verified, quarantined, and found by the next process."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from repository_fixtures import TOKENS, add_snapshot, open_repository, whole_files, write_state_file

from evoke_proxy.adapters.llama.stock_api import ModelFiles
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.adapters.snapshot_index import Record
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.core.request.look_ahead import STEP, USER
from evoke_proxy.core.snapshots.snapshots import Snapshot
from evoke_proxy.engine.storage.snapshot_repository import SnapshotLabel, SnapshotRepository
from evoke_proxy.engine.storage.threads import FileRemover
from evoke_proxy.errors import ConfigError, SnapshotUnusable


def test_snapshots_are_found_by_the_next_process_and_readable_by_the_owner_only(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "slots"
    with open_repository(folder) as first:
        new = add_snapshot(first)
    with open_repository(folder) as second:
        (found,) = second.of("t", "f")
        assert found == new and (found.tokens == TOKENS).all()
        assert second.of("u", "f") == second.of("t", "g") == []
        asyncio.run(second.verify(found))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert modes[f"{new.id}.evoke-kv"] == modes["index.sqlite"] == 0o600


@pytest.mark.parametrize("defect", ["flip", "cut", "longer", "missing", "link"])
def test_a_damaged_snapshot_is_quarantined_and_not_restored(tmp_path: Path, defect: str) -> None:
    metrics = Metrics()
    with open_repository(tmp_path, metrics) as repository:
        new = add_snapshot(repository)
        path = tmp_path / f"{new.id}.evoke-kv"
        data = bytearray(path.read_bytes())
        if defect == "flip":
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        elif defect == "cut":
            path.write_bytes(data[:-1])
        elif defect == "longer":
            path.write_bytes(data + b"x")
        elif defect == "missing":
            path.unlink()
        else:
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(SnapshotUnusable) as caught:
            asyncio.run(repository.verify(new))
        assert repository.of("t", "f") == []
        assert whole_files(tmp_path) == []
        count = metrics.registry.get_sample_value(
            "evoke_snapshot_corrupt_total", {"reason": caught.value.reason}
        )
        assert count == 1


def test_a_snapshot_that_was_deleted_meanwhile_does_not_count_as_damaged(tmp_path: Path) -> None:
    """A request has chosen it, and another one needs its room before its file is read."""
    metrics = Metrics()
    with open_repository(tmp_path, metrics) as repository:
        new = add_snapshot(repository)
        repository.delete(new, "bytes")
        asyncio.run(repository.wait_for_deletions())
        with pytest.raises(SnapshotUnusable) as caught:
            asyncio.run(repository.verify(new))
    labels = {"reason": caught.value.reason}
    assert not metrics.registry.get_sample_value("evoke_snapshot_corrupt_total", labels)


@pytest.mark.parametrize(
    ("n_bytes", "tokens", "reason"),
    [(-1, TOKENS, "size"), (0, TOKENS[::-1].copy(), "tokens"), (0, TOKENS[:-1] + 1, "tokens")],
)
def test_a_save_with_wrong_contents_leaves_no_file(
    tmp_path: Path, n_bytes: int, tokens: np.ndarray, reason: str
) -> None:
    with open_repository(tmp_path) as repository:
        part = repository.new_part()
        size = write_state_file(tmp_path, part) + n_bytes
        with pytest.raises(SnapshotUnusable) as caught:
            asyncio.run(repository.add(part, size, tokens, SnapshotLabel("t", "f", "b", USER, 1.0)))
        assert caught.value.reason == reason
        assert whole_files(tmp_path) == [] and not repository.snapshots


def test_a_save_into_another_directory_is_reported_as_missing(tmp_path: Path) -> None:
    with (
        open_repository(tmp_path) as repository,
        pytest.raises(SnapshotUnusable, match="did not write"),
    ):
        asyncio.run(
            repository.add(
                repository.new_part(), 10, TOKENS, SnapshotLabel("t", "f", "b", USER, 1.0)
            )
        )


def test_files_and_index_agree_after_a_crash(tmp_path: Path) -> None:
    metrics = Metrics()
    with open_repository(tmp_path) as first:
        good = add_snapshot(first, branch="good")
        gone, cut, tried = (add_snapshot(first, branch=name) for name in ("gone", "cut", "tried"))
        (tmp_path / f"{gone.id}.evoke-kv").unlink()
        with (tmp_path / f"{cut.id}.evoke-kv").open("r+b") as file:
            file.truncate(100)
        asyncio.run(first.begin_restore(tried))
        write_state_file(tmp_path, "0123.evoke-part")
        write_state_file(tmp_path, "4567.evoke-kv")
    with open_repository(tmp_path, metrics) as second:
        assert list(second.snapshots) == [good]
        assert whole_files(tmp_path) == [f"{good.id}.evoke-kv"]
    for reason in ("missing", "size", "suspect"):
        sample = {"reason": reason}
        assert metrics.registry.get_sample_value("evoke_snapshot_corrupt_total", sample) == 1


def test_a_restore_that_did_not_end_is_not_tried_again(
    tmp_path: Path,
) -> None:
    with open_repository(tmp_path) as repository:
        new = add_snapshot(repository)
        asyncio.run(repository.begin_restore(new))
        assert [item.suspect for item in repository.snapshots] == [True]
        repository.end_restore(new, useful=True)
        (after,) = repository.snapshots
        assert not after.suspect and after.hits == pytest.approx(1.0)


def test_a_branch_keeps_two_snapshots(tmp_path: Path) -> None:
    with open_repository(tmp_path) as repository:
        add_snapshot(repository, TOKENS[:100])
        user, step = (
            add_snapshot(repository, TOKENS[:200]),
            add_snapshot(repository, TOKENS[:300], kind=STEP),
        )
        assert {item.id for item in repository.snapshots} == {user.id, step.id}
        assert len(whole_files(tmp_path)) == 2


def test_limits_hold_after_every_save(tmp_path: Path) -> None:
    with open_repository(tmp_path, max_count=2) as repository:
        pinned = add_snapshot(repository, branch="a")
        repository.pin(pinned, True)
        for name in "bcd":
            last = add_snapshot(repository, branch=name)
        assert {item.id for item in repository.snapshots} == {pinned.id, last.id}
        assert len(whole_files(tmp_path)) == 2


def test_changes_of_another_process_are_read(tmp_path: Path) -> None:
    with open_repository(tmp_path) as serving:
        new = add_snapshot(serving)
        command = SnapshotRepository(SnapshotsConfig(directory=str(tmp_path)))
        command.open(claim=False)
        (seen,) = command.snapshots
        command.pin(seen, True)
        asyncio.run(command.wait_for_deletions())
        assert [item.pinned for item in serving.snapshots] == [True]
        command.delete(seen, "asked")
        asyncio.run(command.wait_for_deletions())
        assert not serving.snapshots
        command.close()
        assert not (tmp_path / f"{new.id}.evoke-kv").exists()


def test_pins_and_deletions_during_a_restore_are_not_undone(tmp_path: Path) -> None:
    with open_repository(tmp_path) as serving:
        pinned, deleted = add_snapshot(serving, branch="p"), add_snapshot(serving, branch="d")
        command = SnapshotRepository(SnapshotsConfig(directory=str(tmp_path)))
        command.open(claim=False)
        for snapshot in (pinned, deleted):
            asyncio.run(serving.begin_restore(snapshot))
        for seen in list(command.snapshots):
            if seen.branch == "p":
                command.pin(seen, True)
            else:
                command.delete(seen, "asked")
        command.close()
        for snapshot in (pinned, deleted):
            serving.end_restore(snapshot, useful=True)
        (left,) = serving.snapshots
        assert (left.id, left.pinned, left.suspect) == (pinned.id, True, False)


def test_two_proxies_cannot_share_a_directory(tmp_path: Path) -> None:
    with open_repository(tmp_path):
        second = SnapshotRepository(SnapshotsConfig(directory=str(tmp_path)))
        with pytest.raises(ConfigError, match="another evoke-proxy"):
            second.open()
    with open_repository(tmp_path):
        pass


def wait_for(opened: SnapshotRepository, ids: set[str]) -> None:
    """Wait until the repository has exactly these snapshots."""
    deadline = time.monotonic() + 20
    while (seen := {found.id for found in opened.snapshots}) != ids:
        assert time.monotonic() < deadline, f"{seen} instead of {ids}"
        time.sleep(0.01)


def test_proxies_that_share_a_directory_do_not_delete_each_others_snapshots(
    tmp_path: Path,
) -> None:
    with open_repository(tmp_path, shared=True) as first:
        item = add_snapshot(first, branch="first")
        part = first.new_part()
        write_state_file(tmp_path, part)  # llama-server writes it before the index has its row
        with open_repository(tmp_path, shared=True) as second:
            assert [found.id for found in second.snapshots] == [item.id]
            assert (tmp_path / part).exists()
            other = add_snapshot(second, TOKENS + 500, branch="second")
            wait_for(first, {item.id, other.id})
            first.delete(item, "test")  # the index is changed in a separate thread
            wait_for(second, {other.id})
            with pytest.raises(ConfigError, match="another evoke-proxy"), open_repository(tmp_path):
                pass
        wait_for(first, {other.id})
    with open_repository(tmp_path, shared=True) as third:
        assert [found.id for found in third.snapshots] == [other.id]
        assert not (tmp_path / part).exists(), "the last process must remove leftover files"
    with open_repository(tmp_path):
        pass


def test_a_failed_removal_of_a_record_raises_no_error(
    tmp_path: Path,
) -> None:
    with open_repository(tmp_path, shared=True) as repository:
        repository.put_record(Record("a", "t", time.time(), b"x"))
        other = sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        start = time.monotonic()
        repository.remove_record("a")
        # As long as a change of another process takes, and not the default timeout of SQLite.
        assert time.monotonic() - start < 4.5, "requests wait for the removal"
        assert [record.id for record in repository.records()] == ["a"]
        other.close()
        repository.remove_record("a")
        assert not repository.records()


def test_files_of_saves_that_timed_out_are_deleted_repeatedly(tmp_path: Path) -> None:
    with open_repository(tmp_path) as repository:
        parts = [repository.new_part() for _ in range(20)]
        for part in parts:
            repository.discard(part, may_be_written=True)
        repository.discard(parts[10], may_be_written=True)
        asyncio.run(repository.wait_for_deletions())
        for part in parts:  # llama-server writes them after the timeout
            write_state_file(tmp_path, part)
        repository.trim()
        asyncio.run(repository.wait_for_deletions())
        assert whole_files(tmp_path) == sorted(parts[:4])


def test_a_cancelled_wait_for_deletions_does_not_cancel_the_deletions() -> None:
    sweeper, free = FileRemover(), threading.Event()
    gone: list[str] = []

    def wait(_: str) -> None:
        free.wait(60)

    async def cancel_soon() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sweeper.wait_async(), 0.01)
        free.set()
        await sweeper.wait_async()

    sweeper.submit(wait, "one")
    sweeper.submit(gone.append, "other")
    asyncio.run(cancel_soon())
    assert gone == ["other"]
    sweeper.close()


def test_quarantine_keeps_a_few_files(tmp_path: Path) -> None:
    with open_repository(tmp_path) as repository:
        for number in range(7):
            repository.set_aside(add_snapshot(repository, branch=str(number)), "test")
    assert len(list((tmp_path / "quarantine").iterdir())) == 4


def test_a_model_file_is_identified_by_size_time_head_and_tail(tmp_path: Path) -> None:
    path, files = tmp_path / "model.gguf", ModelFiles()
    path.write_bytes(b"a" * 3_000_000)
    first = files.identify(str(path))
    assert first is not None and files.identify(str(path)) is first
    path.write_bytes(b"a" * 2_999_999 + b"b")
    os.utime(path, ns=(first.mtime_ns, first.mtime_ns))
    other = ModelFiles().identify(str(path))
    assert other is not None and other.sample != first.sample and other.n_bytes == first.n_bytes
    assert files.identify(str(tmp_path / "none")) is None


def test_a_full_file_system_loses_no_snapshot(
    tmp_path: Path,
) -> None:
    """A mounted file system of 512 KiB, visible to one process only."""
    mount = 'mount -t tmpfs -o size=512k,mode=700 none "$0" && exec "$@"'
    own = ("unshare", "-m", "sh", "-c", mount, str(tmp_path))
    if not shutil.which("unshare") or subprocess.run([*own, "true"]).returncode != 0:
        pytest.skip("this system lets nobody here mount a file system")
    module = Path(__file__).stem
    call = f"import {module}; {module}.on_a_full_disk({str(tmp_path)!r})"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2]), *sys.path]
    done = subprocess.run(
        [*own, sys.executable, "-c", call],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert done.returncode == 0  # the assertions in on_a_full_disk passed


def on_a_full_disk(where: str) -> None:
    folder = Path(where) / "slots"
    with open_repository(folder) as opened:
        first, second = add_snapshot(opened), add_snapshot(opened, branch="c")
        before = whole_files(folder)
        part = opened.new_part()
        label, n_bytes = SnapshotLabel("t", "f", "d", USER, 1.0), write_state_file(folder, part)
        with (folder / "another's").open("wb", buffering=0) as other:
            while shutil.disk_usage(folder).free:
                other.write(bytes(4096))
        with pytest.raises(SnapshotUnusable, match="full"):
            for _ in range(99):  # as many as fit into the log of changes
                asyncio.run(opened.begin_restore(first))
        with pytest.raises(SnapshotUnusable, match="full"):
            asyncio.run(opened.add(part, n_bytes, TOKENS, label))
        assert whole_files(folder) == before
        asyncio.run(opened.verify(second))
        opened.end_restore(first, useful=True)
        assert {(item.id, item.suspect) for item in opened.snapshots} == {
            (first.id, False),
            (second.id, False),
        }
        opened.delete(first, "room")
        asyncio.run(opened.wait_for_deletions())
        assert [item.id for item in opened.snapshots] == [second.id]
        assert len(whole_files(folder)) == 1
        (folder / "another's").unlink()
        third = add_snapshot(opened, branch="d")
    with open_repository(folder) as opened:
        assert {item.id for item in opened.snapshots} == {second.id, third.id}
        asyncio.run(opened.verify(second))


@pytest.mark.parametrize("reason", ["disk", "cipher"])
def test_a_snapshot_is_quarantined_when_it_cannot_be_decrypted_and_not_for_lack_of_room(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lend(_: str) -> str:
        raise SnapshotUnusable(reason, "it is not lent")

    async def tried(repository: SnapshotRepository, snapshot: Snapshot) -> None:
        await repository.begin_restore(snapshot)
        async with repository.decrypted_file(snapshot):
            pass

    with open_repository(tmp_path) as repository:
        snapshot = add_snapshot(repository)
        monkeypatch.setattr(repository.files, "decrypt", lend)
        with pytest.raises(SnapshotUnusable):
            asyncio.run(tried(repository, snapshot))
        left = [item.suspect for item in repository.snapshots]
    assert left == ([False] if reason == "disk" else [])
