"""Disks that are full or read-only in the middle of a write: what was there stays, is counted, and
the next write after space is back works."""

from __future__ import annotations

import asyncio
import errno
import http.client
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from index_fixtures import TOKENS, kept, vault

from evoke_proxy.adapters import secret_files, snapshot_files
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.adapters.secret_files import write_secret
from evoke_proxy.adapters.snapshot_index import Record
from evoke_proxy.config import EmbedderConfig, PolicyConfig
from evoke_proxy.core.session.session import Session
from evoke_proxy.demo.processes import free_port, proxy_command
from evoke_proxy.engine.embedding.service import EmbeddingService
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository
from evoke_proxy.engine.strategies.budgeted.session_records import VectorRecords
from evoke_proxy.errors import SnapshotUnusable

FAILURES = (errno.ENOSPC, errno.EROFS)


@contextmanager
def unwritable(it: SnapshotRepository) -> Iterator[None]:
    """The index takes nothing: SQLite says so as of a disk that is full or read-only."""
    it._index._db.execute("PRAGMA query_only = 1")
    yield
    it._index._db.execute("PRAGMA query_only = 0")


@pytest.mark.parametrize("code", FAILURES)
def test_a_failed_snapshot_leaves_existing_ones_unchanged(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    async def run(it: SnapshotRepository) -> None:
        first = await kept(it)
        files = sorted(path.name for path in tmp_path.glob("*.evoke-kv"))
        with monkeypatch.context() as patch:
            patch.setattr(snapshot_files.os, "fsync", full)
            with pytest.raises(SnapshotUnusable) as caught:
                await kept(it)
            assert caught.value.reason == "disk"
        assert sorted(path.name for path in tmp_path.glob("*.evoke-*")) == files
        await it.verify(first)
        second = await kept(it)
        await it.verify(second)

    with vault(tmp_path) as it:
        asyncio.run(run(it))


def test_vectors_that_cannot_be_written_leave_the_record_unchanged(tmp_path: Path) -> None:
    metrics = Metrics()

    class Encoder:
        fingerprint = bytes(32)

    embedding = EmbeddingService(EmbedderConfig(), metrics)
    embedding._encoder = Encoder()  # type: ignore[assignment]
    vectors = VectorRecords(embedding)
    known = Conversation(Session("s", "t", PolicyConfig()), TOKENS)

    def embedded(number: int) -> None:
        key = embedding.key(f"text {number}", "t")
        embedding._cache.put(key, np.ones(8, np.float32))
        known.budgeted.embedded = {f"s/{number}": (key,)}

    async def run(it: SnapshotRepository) -> None:
        await it.write_record(Record("s", "t", it.clock.now(), b"record"))
        embedded(0)
        await vectors.write(known, it)
        with unwritable(it):
            embedded(1)
            await vectors.write(known, it)
            with pytest.raises(SnapshotUnusable):
                await it.write_record(Record("s", "t", it.clock.now(), b"another"))
        found = await it.read_records()
        assert {item.packed for item in found if not item.is_part} == {b"record"}
        assert len([item for item in found if item.is_part]) == 1
        embedded(2)
        await vectors.write(known, it)
        parts = [item for item in await it.read_records() if item.is_part]
        read = VectorRecords(embedding).read("s", parts)
        assert read.keys() == {"s/0", "s/2"}

    with vault(tmp_path, metrics) as it:
        asyncio.run(run(it))
    assert metrics.registry.get_sample_value("evoke_index_failures_total") == 2


@pytest.mark.parametrize("code", FAILURES)
def test_a_key_file_that_cannot_be_replaced_is_unchanged(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    write_secret(path, "before")

    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(secret_files.os, "fsync", full)
        with pytest.raises(OSError):
            write_secret(path, "after")
    assert path.read_text() == "before"
    write_secret(path, "after")
    assert path.read_text() == "after"
    assert [item.name for item in tmp_path.iterdir()] == ["keys"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device here")
def test_a_full_disk_for_the_log_fails_no_request() -> None:
    port, nobody = free_port(), free_port()
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(proxy_command(port, nobody), stdout=full, stderr=full)
    try:
        deadline = time.monotonic() + 60
        for _ in range(3):
            while (status := _status(port, "/evoke/health")) is None:
                assert process.poll() is None, "it has ended"
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert status == 200
        # What is logged of a request that fails is more than a line.
        assert _status(port, "/v1/models") == 503
        assert _status(port, "/evoke/health") == 200
    finally:
        process.terminate()
        process.wait(60)
    # Python's own status of a process whose last words could not be written.
    assert process.returncode in (0, 120)


def _status(port: int, path: str) -> int | None:
    """The status of an answer; None when nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except ConnectionError:
        return None
    finally:
        connection.close()
