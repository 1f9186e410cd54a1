"""No request uses a slot whose file is not verified, also when the proxy was killed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from repository_fixtures import open_repository

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.adapters.snapshot_files import SnapshotFiles
from evoke_proxy.config import UpstreamConfig
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository
from evoke_proxy.engine.strategies.snapshots.unverified_slots import UnverifiedSlots
from evoke_proxy.errors import UpstreamRejected, UpstreamTimeout

URL = "http://127.0.0.1:1"


class RecordingApi(StockApi):
    """Records erased slots instead of calling a server."""

    def __init__(self, *errors: Exception) -> None:
        self.erased, self.errors = list[int](), list(errors)

    async def erase(self, slot: int) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.erased.append(slot)


def unverified_slots(repository: SnapshotRepository, url: str = URL) -> UnverifiedSlots:
    return UnverifiedSlots(repository, LlamaClient(UpstreamConfig(url=url)))


def marks(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.evoke-unverified"))


@contextmanager
def started(folder: Path, url: str = URL) -> Iterator[UnverifiedSlots]:
    """As a proxy has them after its start."""
    with open_repository(folder) as repository:
        yield unverified_slots(repository, url)


def test_nothing_waits_and_nothing_is_emptied_without_a_restore(tmp_path: Path) -> None:
    api = RecordingApi()
    with started(tmp_path) as slots:
        asyncio.run(slots.until_verified(api))
    assert api.erased == [] and marks(tmp_path) == []


def test_requests_wait_until_a_slot_is_verified(tmp_path: Path) -> None:
    async def run(slots: UnverifiedSlots) -> None:
        api = RecordingApi()
        assert await slots.begin(2)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(slots.until_verified(api))
            await asyncio.sleep(0.02)
            assert not waiting.done() and len(marks(tmp_path)) == 1
            await slots.end(2, verified=True)
        assert api.erased == [] and marks(tmp_path) == []

    with started(tmp_path) as slots:
        asyncio.run(run(slots))


def test_a_slot_that_failed_is_emptied_once_before_requests_go_on(tmp_path: Path) -> None:
    async def run(slots: UnverifiedSlots) -> None:
        api = RecordingApi()
        assert await slots.begin(2)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(slots.until_verified(api))
            await asyncio.sleep(0)
            await slots.end(2, verified=False)
        assert api.erased == [2] and marks(tmp_path) == []

    with started(tmp_path) as slots:
        asyncio.run(run(slots))


def test_a_record_that_cannot_be_deleted_lets_no_request_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record stays, so that the next start empties the slot."""

    def refuse(*_: object) -> None:
        raise PermissionError("no")

    async def run(slots: UnverifiedSlots) -> None:
        api = RecordingApi()
        for verified, slot in ((True, 2), (False, 3)):
            assert await slots.begin(slot)
            monkeypatch.setattr(SnapshotFiles, "unmark_unverified", refuse)
            await slots.end(slot, verified)
            async with asyncio.timeout(5):
                await slots.until_verified(api)
        assert api.erased == [3] and len(marks(tmp_path)) == 2

    with started(tmp_path) as slots:
        asyncio.run(run(slots))


@pytest.mark.parametrize("url", [URL, "http://localhost:2"])
def test_the_slots_of_a_killed_proxy_are_emptied_by_the_next_one(tmp_path: Path, url: str) -> None:
    """Also when that knows the server by another address, and at each of several servers."""

    async def kill(slots: UnverifiedSlots) -> None:
        assert await slots.begin(1) and await slots.begin(3)

    async def restart(slots: UnverifiedSlots, other: UnverifiedSlots) -> None:
        api = RecordingApi()
        assert await slots.begin(3)  # it is filled anew
        await slots.end(3, verified=True)
        for _ in range(2):
            await slots.until_verified(api)
        assert api.erased == [1] and marks(tmp_path) == []
        await other.until_verified(api)
        assert api.erased == [1, 1, 3]

    with started(tmp_path) as slots:
        asyncio.run(kill(slots))
    assert len(marks(tmp_path)) == 2
    with open_repository(tmp_path) as repository:
        both = unverified_slots(repository, url), unverified_slots(repository, "http://other:1")
        asyncio.run(restart(*both))
    with started(tmp_path) as slots:
        api = RecordingApi()
        asyncio.run(slots.until_verified(api))
    assert api.erased == []


def test_in_a_shared_directory_the_records_of_other_proxies_stay(tmp_path: Path) -> None:
    async def begin(slots: UnverifiedSlots) -> None:
        assert await slots.begin(0)

    with started(tmp_path, "http://other:1") as slots:
        asyncio.run(begin(slots))
    with open_repository(tmp_path, shared=True) as repository:
        api = RecordingApi()
        asyncio.run(unverified_slots(repository).until_verified(api))
    assert api.erased == [0] and len(marks(tmp_path)) == 1


def test_a_slot_is_emptied_later_when_llama_server_does_not_answer(tmp_path: Path) -> None:
    async def run(slots: UnverifiedSlots) -> None:
        assert await slots.begin(0)
        await slots.end(0, verified=False)
        api = RecordingApi(UpstreamTimeout("slow"), UpstreamRejected(500, b"{}"))
        for _ in range(2):
            with pytest.raises((UpstreamTimeout, UpstreamRejected)):
                await slots.until_verified(api)
            assert len(marks(tmp_path)) == 1
        await slots.until_verified(api)
        assert api.erased == [0] and marks(tmp_path) == []

    with started(tmp_path) as slots:
        asyncio.run(run(slots))


@pytest.mark.parametrize("status", [400, 404, 501])
def test_a_server_without_the_slot_has_nothing_to_empty(tmp_path: Path, status: int) -> None:
    async def run(slots: UnverifiedSlots) -> None:
        api = RecordingApi(UpstreamRejected(status, b"{}"))
        assert await slots.begin(0)
        await slots.end(0, verified=False)
        for _ in range(2):
            await slots.until_verified(api)
        assert api.erased == [] and marks(tmp_path) == []

    with started(tmp_path) as slots:
        asyncio.run(run(slots))


def test_a_slot_is_not_filled_early_when_that_cannot_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(slots: UnverifiedSlots) -> None:
        api = RecordingApi()
        assert not await slots.begin(0)
        await slots.until_verified(api)
        assert api.erased == []

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SnapshotFiles, "mark_unverified", full_disk)
    with started(tmp_path) as slots:
        asyncio.run(run(slots))
