"""Session records: in which parts the vectors of a session are written."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evoke_proxy.adapters.clock import SteadyClock
from evoke_proxy.adapters.snapshot_index import Record
from evoke_proxy.engine.server.conversations import VectorState
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
    embedding: Any = SimpleNamespace(mark=b"m", vector=lambda _: np.ones(2, np.float32))
    vector_records, disk = VectorRecords(embedding), Disk()
    there: list[list[str]] = []
    for labels in (["a", "b"], [], ["c"], ["d", "e"]):
        state = VectorState(embedded={label: (b"k",) for label in labels})
        session: Any = SimpleNamespace(id="s", tenant="t", vectors=state)
        asyncio.run(vector_records.write(session, disk))  # type: ignore[arg-type]
        assert not session.vectors.embedded
        assert all(record.session == "s" and record.is_part for record in disk.records)
        there.append(sorted(VectorRecords(embedding).read("s", disk.records)))
    assert there == [["a", "b"], ["a", "b"], ["a", "b", "c"], ["d", "e"]]
