"""A saved slot shows whether its file arrives in the directory of snapshots, and if not, why."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from repository_fixtures import open_repository

from evoke_proxy.adapters.llama.stock_api import SlotCopy, StockApi
from evoke_proxy.engine.strategies.snapshots.saving_test import SavingTest
from evoke_proxy.errors import SnapshotUnusable, UpstreamRejected


class Calls(StockApi):
    """A server that saves each slot as five bytes; it keeps the names of the files."""

    def __init__(self, folder: Path, status: int = 200) -> None:
        self.folder, self.status = folder, status
        self.names: list[str] = []

    async def save(self, slot: int, name: str) -> SlotCopy:
        self.names.append(name)
        if self.status != 200:
            raise UpstreamRejected(self.status, b"no")
        return SlotCopy(2, (self.folder / name).write_bytes(b"state"), 0.1)


def test_a_file_that_arrives_is_examined_and_deleted(tmp_path: Path) -> None:
    examined: list[bytes] = []

    async def examine(part: str, copied: SlotCopy) -> None:
        examined.append((tmp_path / part).read_bytes())

    with open_repository(tmp_path) as repository:
        calls = Calls(tmp_path)
        asyncio.run(SavingTest(repository).run(0, calls, examine))
        asyncio.run(repository.wait_for_deletions())
        assert examined == [b"state"] and not (tmp_path / calls.names[0]).exists()


def test_where_files_do_not_arrive_only_one_is_left(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with open_repository(tmp_path / "slots") as repository:
        test, calls = SavingTest(repository), Calls(other)
        for _ in range(3):
            with pytest.raises(SnapshotUnusable) as raised:
                asyncio.run(test.run(0, calls))
            problem = test.problem_of(raised.value)
            assert problem.code == "other_directory"
            assert f"start llama-server with --slot-save-path {tmp_path / 'slots'}" in problem.fix
        assert len(calls.names) == 3 and len(list(other.iterdir())) == 1


@pytest.mark.parametrize(("status", "code"), [(501, "no_save_path"), (400, "not_saved")])
def test_a_refusal_says_what_is_missing(status: int, code: str, tmp_path: Path) -> None:
    with open_repository(tmp_path) as repository:
        test = SavingTest(repository)
        with pytest.raises(UpstreamRejected) as raised:
            asyncio.run(test.run(0, Calls(tmp_path, status)))
        problem = test.problem_of(raised.value)
        assert problem.code == code
        assert problem.described.startswith("snapshots are off: llama-server ")
        assert problem.described.endswith(f"Change this: {problem.fix}")


@pytest.mark.parametrize(
    ("reason", "fix"),
    [("disk", "same user"), ("size", "free space"), ("link", "only llama-server")],
)
def test_a_file_that_cannot_be_used_has_a_fix_by_its_reason(
    reason: str, fix: str, tmp_path: Path
) -> None:
    with open_repository(tmp_path) as repository:
        problem = SavingTest(repository).problem_of(SnapshotUnusable(reason, "odd"))
        assert problem.code == "not_readable" and fix in problem.fix
