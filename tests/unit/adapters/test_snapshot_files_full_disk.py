"""Full and read-only disks: a failed write changes nothing and is counted, a later one works."""

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
from index_fixtures import TOKENS, add_snapshot, open_repository

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
def unwritable(repository: SnapshotRepository) -> Iterator[None]:
    """Makes writes to the index fail, as SQLite does on a full or read-only disk."""
    repository._index._db.execute("PRAGMA query_only = 1")
    yield
    repository._index._db.execute("PRAGMA query_only = 0")


@pytest.mark.parametrize("code", FAILURES)
def test_a_failed_snapshot_leaves_the_others_unchanged(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    async def run(repository: SnapshotRepository) -> None:
        first = await add_snapshot(repository)
        files = sorted(path.name for path in tmp_path.glob("*.evoke-kv"))
        with monkeypatch.context() as patch:
            patch.setattr(snapshot_files.os, "fsync", fail)
            with pytest.raises(SnapshotUnusable) as caught:
                await add_snapshot(repository)
            assert caught.value.reason == "disk"
        assert sorted(path.name for path in tmp_path.glob("*.evoke-*")) == files
        await repository.verify(first)
        second = await add_snapshot(repository)
        await repository.verify(second)

    with open_repository(tmp_path) as repository:
        asyncio.run(run(repository))


def test_vectors_that_cannot_be_written_leave_the_record_unchanged(tmp_path: Path) -> None:
    metrics = Metrics()

    class Encoder:
        fingerprint = bytes(32)

    embedding = EmbeddingService(EmbedderConfig(), metrics)
    embedding._encoder = Encoder()  # type: ignore[assignment]
    vectors = VectorRecords(embedding)
    conversation = Conversation(Session("s", "t", PolicyConfig()), TOKENS)

    def embed(number: int) -> None:
        key = embedding.key(f"text {number}", "t")
        embedding._cache.put(key, np.ones(8, np.float32))
        conversation.vectors.embedded = {f"s/{number}": (key,)}

    async def run(repository: SnapshotRepository) -> None:
        await repository.write_record(Record("s", "t", repository.clock.now(), b"record"))
        embed(0)
        await vectors.write(conversation, repository)
        with unwritable(repository):
            embed(1)
            await vectors.write(conversation, repository)
            with pytest.raises(SnapshotUnusable):
                await repository.write_record(Record("s", "t", repository.clock.now(), b"another"))
        found = await repository.read_records()
        assert {item.packed for item in found if not item.is_part} == {b"record"}
        assert len([item for item in found if item.is_part]) == 1
        embed(2)
        await vectors.write(conversation, repository)
        parts = [item for item in await repository.read_records() if item.is_part]
        read = VectorRecords(embedding).read("s", parts)
        assert read.keys() == {"s/0", "s/2"}

    with open_repository(tmp_path, metrics) as repository:
        asyncio.run(run(repository))
    assert metrics.registry.get_sample_value("evoke_index_failures_total") == 2


@pytest.mark.parametrize("code", FAILURES)
def test_a_key_file_that_cannot_be_replaced_is_unchanged(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    write_secret(path, "before")

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(secret_files.os, "fsync", fail)
        with pytest.raises(OSError):
            write_secret(path, "after")
    assert path.read_text() == "before"
    write_secret(path, "after")
    assert path.read_text() == "after"
    assert [item.name for item in tmp_path.iterdir()] == ["keys"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_requests_are_answered_while_the_log_is_on_a_full_disk() -> None:
    port, upstream = free_port(), free_port()
    with open("/dev/full", "wb") as log:
        process = subprocess.Popen(proxy_command(port, upstream), stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        for _ in range(3):
            while (status := _status(port, "/evoke/health")) is None:
                assert process.poll() is None, "the proxy has ended"
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert status == 200
        # A failed request logs more than one line.
        assert _status(port, "/v1/models") == 503
        assert _status(port, "/evoke/health") == 200
    finally:
        process.terminate()
        process.wait(60)
    # Python exits with 120 when it cannot flush its output.
    assert process.returncode in (0, 120)


def _status(port: int, path: str) -> int | None:
    """The status of the reply; None if the connection is refused."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except ConnectionError:
        return None
    finally:
        connection.close()
