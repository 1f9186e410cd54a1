"""Blocks of a conversation are copied once no request and no other background work runs."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import LimitsConfig
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.strategies.budgeted import write_back
from evoke_proxy.engine.strategies.budgeted.turn import SlotJob
from evoke_proxy.engine.strategies.budgeted.write_back import WriteBack


class Conversation:
    """What is read of a conversation before its blocks are copied."""

    id = "c"
    tenant = ""

    class budgeted:
        epoch = 1


class Calls:
    blocks = None


async def _copied(copies: list[str], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not copies:
            await asyncio.sleep(0.01)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The conversations that were copied."""
    found: list[str] = []

    async def copy(self: WriteBack, job: SlotJob) -> str:
        found.append(job.conversation.id)
        return "done"

    monkeypatch.setattr(WriteBack, "_copy", copy)
    monkeypatch.setattr(write_back, "_PAUSE_S", 0.0)
    monkeypatch.setattr(write_back, "_RETRY_S", 0.01)
    return found


async def _queue() -> SlotQueue:
    """A queue of one slot, which the conversation has."""
    slots = SlotQueue(LimitsConfig())
    with await slots.acquire(Conversation.id, ""):
        pass
    return slots


def _started(slots: SlotQueue, tasks: BackgroundTasks) -> WriteBack:
    metrics = Metrics()
    started = WriteBack(metrics=metrics, slots=slots, tasks=tasks, records=cast(Any, None))
    started.add(cast(Any, Conversation()), cast(Any, Calls()))
    started.start()
    return started


def test_other_background_work_in_the_slot_only_delays_copying(copies: list[str]) -> None:
    """No request may come whose end would start it again."""

    async def scenario() -> None:
        slots = await _queue()
        async with BackgroundTasks() as tasks:
            other = slots.background(0)
            assert other is not None
            async with other:
                _started(slots, tasks)
                await asyncio.sleep(0.1)
                assert not copies and tasks.busy
            await _copied(copies)
        assert copies == [Conversation.id]

    asyncio.run(scenario())


def test_a_request_ends_the_attempts_until_its_turn_ends(copies: list[str]) -> None:
    async def scenario() -> None:
        slots = await _queue()
        async with asyncio.TaskGroup() as group, BackgroundTasks() as tasks:
            other = slots.background(0)
            assert other is not None
            async with other:
                waiting = _started(slots, tasks)
                request = group.create_task(slots.acquire(Conversation.id, ""))
                async with asyncio.timeout(10):
                    while tasks.busy:
                        await asyncio.sleep(0.01)
            with await request:
                waiting.start()
                assert not tasks.busy
            assert not copies
            waiting.start()
            await _copied(copies)

    asyncio.run(scenario())


def test_a_proxy_that_stops_does_not_wait_for_the_slot(copies: list[str]) -> None:
    async def scenario() -> None:
        slots = await _queue()
        other = slots.background(0)
        assert other is not None
        async with other, asyncio.timeout(10):
            async with BackgroundTasks() as tasks:
                _started(slots, tasks)
                await asyncio.sleep(0.05)
                slots.close()
        assert not copies

    asyncio.run(scenario())
