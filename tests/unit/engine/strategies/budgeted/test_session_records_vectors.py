"""Session records: in which parts the vectors of a session are written."""

from __future__ import annotations

import asyncio
import json
import tarfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evoke_proxy.adapters.clock import SteadyClock
from evoke_proxy.adapters.snapshot_index import Record
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.core.retrieval.vectors import encode_vectors
from evoke_proxy.engine.server.conversation_states import VectorState
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository
from evoke_proxy.engine.strategies.budgeted.session_records import VectorRecords


class Disk:
    """Holds the records of one session."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.clock = SteadyClock()

    async def write_record(self, record: Record) -> None:
        self.records.append(record)

    def remove_record(self, id: str) -> None:
        self.records.clear()


def test_vector_parts_are_appended_up_to_a_limit_and_then_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "evoke_proxy.engine.strategies.budgeted.session_records._MAX_VECTOR_BLOCKS", 3
    )
    embedding: Any = SimpleNamespace(fingerprint=b"m", vector=lambda _: np.ones(2, np.float32))
    vector_records, disk = VectorRecords(embedding), Disk()
    there: list[list[str]] = []
    state = VectorState()
    for labels in (["a", "b"], [], ["c"], ["d", "e"]):
        for label in labels:
            state.was_embedded(label, (b"k",))
        session: Any = SimpleNamespace(id="s", tenant="t", vectors=state)
        asyncio.run(vector_records.write(session, disk))  # type: ignore[arg-type]
        assert not session.vectors.embedded
        assert all(record.session == "s" and record.is_part for record in disk.records)
        there.append(sorted(VectorRecords(embedding).read("s", disk.records)))
    assert there == [["a", "b"], ["a", "b"], ["a", "b", "c"], ["d", "e"]]


def test_vectors_are_encoded_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a long session are megabytes."""
    encoders: list[int] = []

    def recorded(fingerprint: bytes, vectors: Any) -> bytes:
        encoders.append(threading.get_ident())
        return encode_vectors(fingerprint, vectors)

    monkeypatch.setattr(f"{VectorRecords.__module__}.encode_vectors", recorded)
    embedding: Any = SimpleNamespace(fingerprint=b"m", vector=lambda _: np.ones(2, np.float32))
    session: Any = SimpleNamespace(id="s", tenant="t", vectors=VectorState(embedded={"a": (b"k",)}))
    disk = Disk()
    asyncio.run(VectorRecords(embedding).write(session, disk))  # type: ignore[arg-type]
    assert disk.records and encoders and threading.get_ident() not in encoders


def test_vectors_written_at_043861e_are_read_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fixture = Path(__file__).parents[4] / "fixtures/043861e/session.tar.xz"
    with tarfile.open(fixture) as archive:
        archive.extractall(tmp_path, filter="data")
    directory = str(tmp_path / "slots")
    # The fixture may not be deleted for its age.
    repository = SnapshotRepository(
        SnapshotsConfig(directory=directory, min_free_mib=0, max_age_h=10_000_000)
    )
    repository.open()
    try:
        parts = [record for record in repository.records() if record.is_part]
    finally:
        repository.close()
    encoder, shapes = json.loads(parts[0].packed.partition(b"\n")[0])
    assert len(parts) == 6 and len(shapes) == 4

    def read(fingerprint: bytes) -> dict[str, int]:
        embedding: Any = SimpleNamespace(fingerprint=fingerprint)
        return {label: len(v) for label, v in VectorRecords(embedding).read("s", parts).items()}

    assert {label: count for label, count, _ in shapes}.items() <= read(
        bytes.fromhex(encoder)
    ).items()
    assert len(read(bytes.fromhex(encoder))) == 23
    assert read(b"another encoder") == {} and not caplog.messages
