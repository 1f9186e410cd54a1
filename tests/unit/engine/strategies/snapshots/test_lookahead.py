"""Decoding ahead on a patched server, and turns that arrive meanwhile."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import virtual_time
from session_fixtures import session_record

from evoke_proxy.adapters.clock import SteadyClock
from evoke_proxy.adapters.llama.stock_api import PrefillResult, StockApi
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config, SnapshotsConfig
from evoke_proxy.core.prompt.rendered import SlotView
from evoke_proxy.core.session.codec import OperatorOverrides
from evoke_proxy.core.session.codec import decode as decode_record
from evoke_proxy.engine.admin.admin import Admin
from evoke_proxy.engine.assembly import build_router
from evoke_proxy.engine.server import slot_queue
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.server import Server
from evoke_proxy.engine.strategies.budgeted.saving_check import SavingCheck
from evoke_proxy.engine.strategies.budgeted.session_records import SessionRecords, VectorRecords
from evoke_proxy.engine.strategies.budgeted.slot_snapshots import SlotSnapshots
from evoke_proxy.engine.strategies.budgeted.turn import SlotJob
from evoke_proxy.engine.strategies.snapshots.lookahead import Lookahead

# The slot snapshots of each server that a test makes.
whole: dict[Server, SlotSnapshots] = {}
TIMINGS = {"evoke": {"marker": "stale"}}


def with_engine(
    monkeypatch: Any, use: Callable[[Server, Conversation, list[str]], Coroutine[Any, Any, None]]
) -> list[str]:
    """Returns the events with a llama-server that decodes for a while and rejects the epoch."""
    events: list[str] = []

    async def run() -> None:
        # No file is written, and the directory is not opened.
        router = build_router(Config(snapshots=SnapshotsConfig(directory="unused")))
        engine, snapshots = router.server, router.server.strategies.snapshots
        engine.conversations.recall(session_record())
        (conversation,) = engine.conversations
        conversation.budgeted.epoch = 5
        engine.slots.restart(2)

        async def prefill(*_: object) -> PrefillResult:
            events.append("begun")
            await asyncio.sleep(0.05)
            events.append("decoded")
            return PrefillResult(0, 0, 9, 0.05, TIMINGS)

        whole[engine] = SlotSnapshots(
            probe=snapshots.probe,
            transfers=snapshots.transfers,
            repository=router.shared.repository,
            saving=SavingCheck(router.shared.repository, engine.slots),
            conversations=engine.conversations,
            metrics=engine.resources.metrics,
        )
        monkeypatch.setattr(StockApi, "prefill", prefill)
        async with snapshots, engine.resources.background:
            await use(engine, conversation, events)

    virtual_time.run(run())
    return events


async def decode(engine: Server, conversation: Conversation, events: list[str], n: int = 9) -> None:
    """Decode ahead in slot 0, as the copying of blocks does."""

    async def settle() -> None:
        events.append("settling")
        await asyncio.sleep(0.3)
        events.append("idle")

    lease = engine.slots.background(0, conversation.id, settle, engine.resources.background.run)
    assert lease is not None
    async with lease:
        job = SlotJob(conversation=conversation, calls=engine.resources.calls, lease=lease)
        await whole[engine].decode_ahead(job, np.arange(n, dtype=np.int32))


def test_a_turn_waits_for_background_decoding_that_ends_soon(monkeypatch: Any) -> None:
    async def use(engine: Server, conversation: Conversation, events: list[str]) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(decode(engine, conversation, events))
            await asyncio.sleep(0.01)
            with await engine.slots.acquire(conversation.id, "t", slot=0) as lease:
                assert lease.waited and conversation.budgeted.epoch is None, (
                    "its result must be recorded before the turn"
                )

    assert with_engine(monkeypatch, use) == ["begun", "decoded"]


def test_long_background_decoding_is_preempted_and_its_slot_drained(monkeypatch: Any) -> None:
    monkeypatch.setattr(slot_queue, "_GRACE_S", 0.01)

    async def use(engine: Server, conversation: Conversation, events: list[str]) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(decode(engine, conversation, events))
            await asyncio.sleep(0.01)
            with await engine.slots.acquire(conversation.id, "t", slot=0) as lease:
                assert lease.waited
                events.append("granted")
        assert conversation.budgeted.epoch == 5

    assert with_engine(monkeypatch, use) == ["begun", "settling", "idle", "granted"]


def test_a_turn_in_another_slot_preempts_background_decoding_without_waiting(
    monkeypatch: Any,
) -> None:
    async def use(engine: Server, conversation: Conversation, events: list[str]) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(decode(engine, conversation, events))
            await asyncio.sleep(0.01)
            with await engine.slots.acquire("other", "t", slot=1) as lease:
                assert not lease.waited
                events.append("granted")
        assert conversation.budgeted.epoch == 5

    assert with_engine(monkeypatch, use) == ["begun", "granted", "settling", "idle"]


def test_no_background_lease_while_a_request_runs_or_is_expected(monkeypatch: Any) -> None:
    async def use(engine: Server, conversation: Conversation, events: list[str]) -> None:
        slots = engine.slots
        with await slots.acquire("other", "t", slot=1):
            assert slots.background(0, conversation.id) is None
        with slots.expected():
            assert slots.background(0, conversation.id) is None
        await decode(engine, conversation, events)

    assert with_engine(monkeypatch, use) == ["begun", "decoded"]


def test_a_background_task_cancelled_twice_releases_no_busy_slot(monkeypatch: Any) -> None:
    async def use(engine: Server, conversation: Conversation, events: list[str]) -> None:
        task = asyncio.get_running_loop().create_task(decode(engine, conversation, events))
        await asyncio.sleep(0.01)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        with await engine.slots.acquire("other", "t", slot=0):
            events.append("granted")

    assert with_engine(monkeypatch, use) == ["begun", "settling", "idle", "granted"]


@pytest.mark.parametrize("expected", [False, True])
def test_decoding_ahead_runs_in_steps_until_a_request_comes(
    expected: bool, monkeypatch: Any
) -> None:
    async def use(engine: Server, conversation: Conversation, events: list[str]) -> None:
        monkeypatch.setitem(TIMINGS["evoke"], "marker", "ok")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(decode(engine, conversation, events, n=1100))
            await asyncio.sleep(0.01)
            if expected:
                with await engine.slots.acquire("other", "t", slot=0):
                    pass
        assert conversation.budgeted.epoch == 5

    steps = ["begun", "decoded"]
    assert with_engine(monkeypatch, use) == (steps if expected else 3 * steps)


def test_a_session_deleted_during_its_save_is_not_recorded(monkeypatch: Any) -> None:
    async def use(engine: Server, conversation: Conversation, events: list[str]) -> None:
        class Disk:
            clock = SteadyClock()

            async def write_record(self, record: Any) -> None:
                events.append(record.id)

        nothing: Any = None
        disk: Any = Disk()
        records = SessionRecords(disk, VectorRecords(nothing), engine.conversations)
        monkeypatch.setattr(engine.strategies.budgeted._records, "_records", records)
        view = SlotView.parse({"id": 0, "epoch": 5, "n_tokens": 0, "resident": [], "n_free": 9})
        for _ in range(2):
            lease = engine.slots.background(0, conversation.id)
            assert lease is not None
            async with lease:
                job = SlotJob(conversation=conversation, calls=engine.resources.calls, lease=lease)
                await engine.strategies.budgeted._records.save(job, view, {})
            assert not engine.slots.pool.is_locked(conversation.id)
            engine.conversations.forget(conversation)

    assert len(with_engine(monkeypatch, use)) == 1


def test_operator_changes_during_a_save_are_recorded(
    tmp_path: Path,
) -> None:
    async def write_overrides() -> OperatorOverrides:
        router = build_router(Config(snapshots=SnapshotsConfig(directory=str(tmp_path))))
        engine, records = router.server, router.server.strategies.budgeted._records
        snapshots = engine.strategies.snapshots
        async with router.shared, snapshots:
            engine.conversations.recall(session_record())
            (conversation,) = engine.conversations
            conversation.pinned = False
            view = SlotView.parse({"id": 0, "epoch": 5, "n_tokens": 0, "resident": [], "n_free": 9})
            lease = engine.slots.background(0, conversation.id)
            assert lease is not None
            job = SlotJob(conversation=conversation, calls=engine.resources.calls, lease=lease)
            keeping = records.save(job, view, {})
            task = asyncio.get_running_loop().create_task(keeping)
            await asyncio.sleep(0)
            Admin(router).pin(conversation.id, True)
            await task
            (record,) = snapshots.repository.records(conversation.id)
            return decode_record(zlib.decompress(record.packed)).overrides

    assert asyncio.run(write_overrides()).pinned


def test_a_look_ahead_that_waits_for_its_save_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene() -> None:
        nothing: Any = None
        decoded, may_save = list[str](), asyncio.Event()

        async def run(_: object, conversation: Any) -> tuple[str, Any]:
            decoded.append(conversation.id)
            return "done", np.arange(9, dtype=np.int32)

        async def save(*_: object) -> None:
            await may_save.wait()

        async with BackgroundTasks() as tasks:
            ahead = Lookahead(
                probe=nothing,
                transfers=nothing,
                placement=nothing,
                slots=nothing,
                metrics=Metrics(),
                tasks=tasks,
            )
            monkeypatch.setattr(ahead, "_run", run)
            monkeypatch.setattr(ahead, "_save", save)
            for id in ("a", "b"):
                conversation: Any = SimpleNamespace(id=id)
                ahead.start(nothing, conversation)
            for _ in range(9):
                await asyncio.sleep(0)
            may_save.set()
            assert decoded == ["a", "b"]

    asyncio.run(scene())
