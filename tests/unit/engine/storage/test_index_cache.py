"""The cached rows of the index equal those on the disk."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repository_fixtures import TOKENS, add_snapshot, open_repository

from evoke_proxy.adapters.snapshot_index import SnapshotIndex
from evoke_proxy.core.snapshots.snapshots import Snapshot


def test_only_changed_rows_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    whole = SnapshotIndex._snapshot

    def counted(self: SnapshotIndex, row: tuple[Any, ...]) -> Snapshot:
        read.append(row[0])
        return whole(self, row)

    with open_repository(tmp_path, shared=True) as first:
        old = [add_snapshot(first, TOKENS + i, branch=f"b{i}") for i in range(4)]
        with open_repository(tmp_path, shared=True) as second:
            assert {item.id for item in second.snapshots} == {item.id for item in old}
            monkeypatch.setattr(SnapshotIndex, "_snapshot", counted)
            new = add_snapshot(first, TOKENS + 9, branch="new")
            first.pin(old[1], True)
            first.delete(old[2], "test")
            passing = add_snapshot(first, TOKENS + 11, branch="passing")
            first.delete(passing, "test")
            asyncio.run(first.wait_for_deletions())
            asyncio.run(second.refresh())
            assert read == [new.id]
            found = {item.id: item for item in second.snapshots}
            assert read == [new.id], "no row must be read twice"
            assert found.keys() == {new.id, old[0].id, old[1].id, old[3].id}
            assert found[old[1].id].pinned and found[new.id] == new
            assert found[new.id].tokens.tolist() == new.tokens.tolist()
            asyncio.run(first.refresh())
            second.pin(new, True)
            second.delete(old[0], "test")
            asyncio.run(second.wait_for_deletions())
            assert {item.id: item.pinned for item in first.snapshots} == {
                **dict.fromkeys((new.id, old[1].id), True),
                old[3].id: False,
            }
            assert read == [new.id], "only the marks of known rows may be read"


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.booleans()), max_size=14))
def test_the_index_cache_equals_the_index_after_changes(steps: list[tuple[int, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with (
            open_repository(Path(folder), shared=True) as one,
            open_repository(Path(folder), shared=True) as two,
        ):
            proxies = one, two
            for step_kind, which, second in steps:
                proxy, there = proxies[second], list(proxies[second].snapshots)
                if step_kind < 2 or not there:
                    add_snapshot(proxy, TOKENS + which, branch=f"{which}")
                elif step_kind == 2:
                    proxy.pin(there[which % len(there)], bool(which % 3))
                elif step_kind == 3:
                    proxy.delete(there[which % len(there)], "test")
                else:
                    asyncio.run(proxy.refresh())
                asyncio.run(proxy.wait_for_deletions())
                expected = {item.id: item for item in proxy._index.all()}
                assert {item.id: item for item in proxies[not second].snapshots} == expected
                assert {item.id: item for item in proxy.snapshots} == expected
