"""Memory of request bodies: who waits, who is refused, and that all of it is returned."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any

import pytest
import virtual_time

from evoke_proxy.engine.parsing.body_budget import FREE_BYTES, BodyBudget
from evoke_proxy.errors import BodyMemoryFull

MIB = 1 << 20


async def _seconds(work: Coroutine[Any, Any, None]) -> float:
    loop = asyncio.get_running_loop()
    start = loop.time()
    await work
    return loop.time() - start


def test_small_bodies_take_no_memory() -> None:
    async def work() -> None:
        budget = BodyBudget(lambda: 0)
        with budget.share("a", copies=3) as share:
            await share.announce(FREE_BYTES)
            for _ in range(4):
                await share.take(FREE_BYTES // 4)
            assert budget.n_bytes == share.n_bytes == 0
            with pytest.raises(BodyMemoryFull):
                await share.take(1)

    virtual_time.run(work())


def test_bytes_above_the_free_ones_count_once_for_each_copy_until_the_end() -> None:
    async def work() -> None:
        budget = BodyBudget(lambda: 8)
        with budget.share("a", copies=3) as share:
            await share.take(FREE_BYTES + 1000)
            assert budget.n_bytes == share.n_bytes == 3000
            assert budget.largest() == "a"
        assert budget.n_bytes == 0 and budget.largest() is None

    virtual_time.run(work())


def test_a_tenant_may_use_three_times_the_memory_that_is_left() -> None:
    async def work() -> None:
        budget = BodyBudget(lambda: 8)
        with budget.share("a") as share, budget.share("b") as other:
            await share.take(FREE_BYTES + 6 * MIB)
            assert not budget.fits(share, 1)
            assert budget.fits(other, MIB), "another tenant finds room"
            with pytest.raises(BodyMemoryFull):
                await share.take(1)

    virtual_time.run(work())


def test_a_body_that_does_not_fit_waits_two_seconds_and_takes_what_becomes_free() -> None:
    async def work() -> None:
        budget = BodyBudget(lambda: 8)
        with budget.share("a") as waiting, ExitStack() as earlier:
            first = earlier.enter_context(budget.share("a"))
            await first.take(FREE_BYTES + 6 * MIB)

            async def refused() -> None:
                with pytest.raises(BodyMemoryFull):
                    await waiting.announce(FREE_BYTES + MIB)

            assert await _seconds(refused()) == pytest.approx(2)
            asyncio.get_running_loop().call_later(1, earlier.close)
            assert await _seconds(waiting.take(FREE_BYTES + MIB)) == pytest.approx(1)
            assert budget.n_bytes == MIB

    virtual_time.run(work())


def test_the_newest_body_of_the_tenant_with_most_bytes_is_refused_for_another_tenant() -> None:
    async def work() -> None:
        budget = BodyBudget(lambda: 8)
        older_ended = asyncio.Event()

        async def read(size: int, ended: asyncio.Event | None = None) -> str:
            with budget.share("large") as share:
                try:
                    async with asyncio.timeout(None) as stop:
                        with share.reading(stop):
                            await share.take(FREE_BYTES + size)
                            await (ended or asyncio.Event()).wait()
                except TimeoutError:
                    return "refused" if share.refused else "timed out"
                return "read"

        async with asyncio.TaskGroup() as tasks:
            older = tasks.create_task(read(3 * MIB, older_ended))
            await asyncio.sleep(0)
            newer = tasks.create_task(read(3 * MIB))
            await asyncio.sleep(0)
            with budget.share("small") as share:
                assert await _seconds(share.take(FREE_BYTES + 2 * MIB)) < 2
            assert await newer == "refused"
            older_ended.set()
        assert older.result() == "read" and budget.n_bytes == 0

    virtual_time.run(work())


def test_an_announced_body_that_does_not_arrive_reserves_nothing() -> None:
    async def work() -> None:
        budget = BodyBudget(lambda: 8)
        with budget.share("a") as share:
            await share.announce(4 * MIB)
            assert budget.n_bytes == 0

    virtual_time.run(work())
