"""Whether a patched server saves its slots: checked once, and again while there is a problem."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from repository_fixtures import open_repository

from evoke_proxy.adapters.llama.stock_api import SlotCopy, StockApi
from evoke_proxy.config import LimitsConfig
from evoke_proxy.core.snapshots.slot_contents import SlotStatus
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.strategies.budgeted import saving_check
from evoke_proxy.engine.strategies.budgeted.saving_check import SavingCheck
from evoke_proxy.errors import UpstreamTimeout


class Calls(StockApi):
    """A server with two slots, which saves them in a folder."""

    lists = True
    is_slow = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.saved: list[int] = []

    async def list_slots(self) -> Sequence[SlotStatus] | None:
        if self.is_slow:
            raise UpstreamTimeout("no answer in time", "")
        slots = [SlotStatus(0, 1, 500, False), SlotStatus(1, 1, 2, False)]
        return slots if self.lists else None

    async def save(self, slot: int, name: str) -> SlotCopy:
        self.saved.append(slot)
        return SlotCopy(2, (self.folder / name).write_bytes(b"state"), 0.1)


def queue() -> SlotQueue:
    slots = SlotQueue(LimitsConfig())
    slots.restart(2)
    return slots


def test_the_smallest_idle_slot_is_saved_once_for_each_instance(tmp_path: Path) -> None:
    async def scenario() -> None:
        with open_repository(tmp_path) as repository:
            calls, check = Calls(tmp_path), SavingCheck(repository, queue())
            assert check.is_due and check.describe() == ""
            await asyncio.gather(check.run(calls), check.run(calls))
            assert (calls.saved, check.problem, check.is_due) == ([1], None, False)
            assert check.describe() == f"snapshots in {tmp_path}: 0 snapshots, 0 MiB"
            check.forget()
            await check.run(calls)
            assert calls.saved == [1, 1]

    asyncio.run(scenario())


def test_a_slot_that_a_request_has_is_not_saved(tmp_path: Path) -> None:
    async def scenario() -> None:
        with open_repository(tmp_path) as repository:
            slots = queue()
            calls, check = Calls(tmp_path), SavingCheck(repository, slots)
            with await slots.acquire("s", "", slot=1):
                await check.run(calls)
                assert not calls.saved and check.is_due and check.describe() == ""
            calls.is_slow = True
            with pytest.raises(UpstreamTimeout):
                await check.run(calls)
            calls.is_slow = False
            await check.run(calls)
            assert calls.saved == [1] and not check.is_due
            assert slots.pool.idle(), "the slot was given back"

    asyncio.run(scenario())


def test_a_server_that_does_not_list_its_slots_is_asked_once(tmp_path: Path) -> None:
    with open_repository(tmp_path) as repository:
        calls, check = Calls(tmp_path), SavingCheck(repository, queue())
        calls.lists = False
        asyncio.run(check.run(calls))
        assert not check.is_due and check.problem is None and not calls.saved


def test_a_problem_is_logged_once_and_checked_again_each_minute_until_it_is_solved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(saving_check, "time", SimpleNamespace(monotonic=lambda: now))
    caplog.set_level("INFO")
    other = tmp_path / "other"
    other.mkdir()

    async def scenario() -> None:
        nonlocal now
        with open_repository(tmp_path / "slots") as repository:
            calls, check = Calls(other), SavingCheck(repository, queue())
            for n_saves in (1, 2):
                await check.run(calls)
                await check.run(calls)
                assert len(calls.saved) == n_saves
                assert check.problem is not None and check.problem.code == "other_directory"
                now += 61
            assert caplog.messages == [check.problem.described]
            calls.folder = tmp_path / "slots"
            await check.run(calls)
            assert check.problem is None and caplog.messages[1:] == [check.describe()]
            now += 61
            assert not check.is_due

    asyncio.run(scenario())
