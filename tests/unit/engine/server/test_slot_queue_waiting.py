"""SlotQueue: requests wait for a slot in order, for a limited time, and over server restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from evoke_proxy.config import LimitsConfig
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.errors import SlotsBusy

LIMITS = LimitsConfig(queue=2, queue_timeout_s=5.0)


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


def test_a_waiting_request_gets_the_released_slot_with_the_displaced_session() -> None:
    async def work() -> None:
        queue = SlotQueue(LIMITS)
        first = await queue.acquire("a", "")
        async with asyncio.TaskGroup() as group:
            second = group.create_task(queue.acquire("b", ""))
            await asyncio.sleep(0)
            assert not second.done()
            first.release()
        lease = second.result()
        assert (first.victim, first.waited) == (None, False)
        assert (lease.slot, lease.victim, lease.waited) == (0, "a", True)

    _run(work())


def test_a_full_queue_refuses_with_retry_after() -> None:
    async def work() -> None:
        queue = SlotQueue(LimitsConfig(queue=0))
        await queue.acquire("a", "")
        with pytest.raises(SlotsBusy) as refused:
            await queue.acquire("b", "")
        assert refused.value.retry_after > 0

    _run(work())


def test_waiting_ends_after_the_queue_timeout() -> None:
    async def work() -> None:
        queue = SlotQueue(LimitsConfig(queue=1, queue_timeout_s=0.02))
        lease = await queue.acquire("a", "")
        with pytest.raises(SlotsBusy, match="no slot became free"):
            await queue.acquire("b", "")
        assert queue.pool.queued == 0
        lease.release()
        assert (await queue.acquire("c", "")).waited is False

    _run(work())


@pytest.mark.parametrize("granted_first", [False, True])
@pytest.mark.parametrize("cancelled_first", [False, True])
def test_a_cancelled_waiter_is_replaced_by_the_next(
    granted_first: bool, cancelled_first: bool
) -> None:
    async def work() -> None:
        queue = SlotQueue(LIMITS)
        lease = await queue.acquire("a", "")
        cancelled = asyncio.get_running_loop().create_task(queue.acquire("b", ""))
        waiting = asyncio.get_running_loop().create_task(queue.acquire("c", ""))
        await asyncio.sleep(0)
        if granted_first:
            lease.release()
        cancelled.cancel()
        if not cancelled_first:
            await asyncio.sleep(0)
        if not granted_first:
            lease.release()
        assert (await waiting).slot == 0
        assert cancelled.cancelled() or cancelled.cancelling()
        assert queue.pool.queued == 0

    _run(work())


@pytest.mark.parametrize("n_slots", [1, 2, 3])
def test_a_running_turn_keeps_its_slot_when_llama_server_restarts(n_slots: int) -> None:
    async def work() -> None:
        queue = SlotQueue(LIMITS)
        queue.restart(2)
        other, running = await queue.acquire("a", ""), await queue.acquire("b", "")
        assert running.slot == 1
        other.release()
        queue.restart(n_slots)
        second = asyncio.get_running_loop().create_task(queue.acquire("b", ""))
        await asyncio.sleep(0)
        assert not second.done(), "two turns of a session run at once"
        assert queue.pool.slot_of("a") is None and len(queue.pool) == n_slots
        running.release()
        assert (await second).slot == min(1, n_slots - 1)

    _run(work())


def test_waiters_move_into_the_slots_of_a_larger_server() -> None:
    async def work() -> None:
        queue = SlotQueue(LIMITS)
        await queue.acquire("a", "")
        waiting = asyncio.get_running_loop().create_task(queue.acquire("b", ""))
        await asyncio.sleep(0)
        queue.restart(2)
        assert (await waiting).slot == 1

    _run(work())


def test_a_waiter_for_a_slot_that_a_smaller_server_lacks_takes_any() -> None:
    async def work() -> None:
        queue = SlotQueue(LIMITS)
        queue.restart(2)
        first, second = await queue.acquire("a", ""), await queue.acquire("b", "")
        waiting = asyncio.get_running_loop().create_task(queue.acquire("c", "", slot=1))
        await asyncio.sleep(0)
        queue.restart(1)
        second.release()
        await asyncio.sleep(0)
        assert not waiting.done()
        first.release()
        assert (await waiting).slot == 0
        assert repr(queue.pool) == "<SlotPool [c*] queued=0>"

    _run(work())


@pytest.mark.parametrize("slots", [(3, 1, 3), (1, 3), (3, 1), (3, 2, 1, 2)])
def test_a_session_with_a_running_request_stays_locked_over_a_server_restart(
    slots: tuple[int, ...],
) -> None:
    """Its second request waits, however many slots the restarted servers have."""

    async def work() -> None:
        queue = SlotQueue(LIMITS)
        first, *later = slots
        queue.restart(first)
        old = await queue.acquire("a", "", slot=first - 1)
        for n_slots in later:
            queue.restart(n_slots)
        second = asyncio.get_running_loop().create_task(queue.acquire("a", ""))
        others = [await queue.acquire(name, "") for name in "xyz"[: later[-1] - 1]]
        assert not second.done()
        old.release()
        with await second as lease:
            assert lease.slot < len(queue.pool)
            assert lease.slot not in [other.slot for other in others]
        for other in others:
            other.release()
        assert queue.pool.idle() and not queue.pool.queued

    _run(work())
