"""The index of snapshots: a damaged file is quarantined and returns no wrong rows."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from damage import DAMAGES, damage, in_memory
from repository_fixtures import TOKENS, add_snapshot, open_repository
from snapshot_fixtures import snapshot

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.adapters.snapshot_index import Record, SnapshotIndex, pack
from evoke_proxy.core.request.look_ahead import USER


def test_a_file_that_is_not_an_index_is_quarantined_and_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").write_bytes(b"not a database" * 100)
    metrics = Metrics()
    with open_repository(tmp_path, metrics) as repository:
        assert list(repository.snapshots) == []
        add_snapshot(repository)
    aside = tmp_path / "quarantine/index.sqlite"
    assert aside.read_bytes().startswith(b"not a database")
    bad = metrics.registry.get_sample_value("evoke_snapshot_corrupt_total", {"reason": "index"})
    assert bad == 1


def test_a_snapshot_that_states_its_tokens_as_seconds_is_read_with_less(tmp_path: Path) -> None:
    """Those of patched servers did; they would be deleted last of all."""
    index = SnapshotIndex(tmp_path / "index.sqlite")
    tokens = list(range(2000))
    for name, seconds in (("old", 2000.0), ("new", 1.5)):
        item = snapshot(name, tokens, prefill_s=seconds)
        index.add(item, pack(item.tokens))
    assert {item.id: item.prefill_s for item in index.all()} == {"old": 2.0, "new": 1.5}
    index.close()


def test_an_index_with_invalid_text_is_quarantined(tmp_path: Path) -> None:
    """The random damage below hits a text too rarely; one flipped bit makes it invalid UTF-8."""
    with open_repository(tmp_path) as repository:
        repository.put_record(Record("a", "whose-it-is", time.time(), b"x"))
    path = tmp_path / "index.sqlite"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"whose-it-is", b"\xf7hose-it-is"))
    assert path.read_bytes() != data
    with open_repository(tmp_path) as repository:
        assert not repository.records() and (tmp_path / "quarantine/index.sqlite").exists()


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal"])
def test_a_damaged_index_never_returns_wrong_snapshots(name: str) -> None:
    """After each of 200 truncations and bit flips, all that is found equals what was stored, and
    a new snapshot can be stored."""
    with in_memory() as memory:
        found, records = _damage_repeatedly(memory / "slots", name)
    assert found > 0 < records


def _damage_repeatedly(folder: Path, name: str) -> tuple[int, int]:
    """Returns how many snapshots and records were found, each equal to what was stored."""
    rng = random.Random(name)
    with open_repository(folder) as repository:
        for number in range(4):
            add_snapshot(repository, TOKENS + 1000 * number, f"b{number}")
            repository.put_record(Record(f"r{number}", "t", time.time(), bytes([number]) * 500))
        whole = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    there = {item.name: item.read_bytes() for item in folder.iterdir() if item.is_file()}
    source = whole if name.endswith("wal") else there
    found = records = 0
    for number in range(DAMAGES):
        shutil.rmtree(folder)
        folder.mkdir()
        for file_name, data in source.items():
            (folder / file_name).write_bytes(data)
        damage(folder / name, rng)
        with open_repository(folder) as repository:
            for item in repository.snapshots:
                start = 1000 * int(item.branch.removeprefix("b"))
                assert np.array_equal(item.tokens, TOKENS + start)
                assert (item.tenant, item.fingerprint, item.kind) == ("t", "f", USER)
                asyncio.run(repository.verify(item))
                found += 1
            for record in repository.records():
                assert record.packed == bytes([int(record.id.removeprefix("r"))]) * 500
                assert record.tenant == "t"
                records += 1
            if number % 10 == 0:
                add_snapshot(repository, TOKENS + 9000, "new")
    return found, records
