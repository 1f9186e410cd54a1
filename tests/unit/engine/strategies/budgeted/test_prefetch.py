"""Drafts of one client are planned for a limited share of the time."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from evoke_proxy.engine.server.slot_queue import finished
from evoke_proxy.engine.strategies.budgeted.prefetch import Prefetcher, TimeShares
from evoke_proxy.engine.strategies.budgeted.turn import ThreadTime
from evoke_proxy.thread_pools import SESSIONS, run_in


def test_drafts_of_a_client_take_half_of_the_time_at_most() -> None:
    shares, taken = TimeShares(), 0.0
    for step in range(1000):  # 100 seconds
        now = 50 + step / 10
        if shares.has_time("greedy", now):
            shares.take("greedy", 0.4, now)
            taken += 0.4
    assert 40 < taken < 52
    assert shares.has_time("other", now)


def test_short_drafts_always_have_time() -> None:
    shares = TimeShares()
    for step in range(1000):
        now = 50 + step / 4
        assert shares.has_time("me", now)
        shares.take("me", 0.1, now)


def test_time_that_was_not_used_is_saved_for_a_second() -> None:
    shares = TimeShares()
    for _ in range(2):
        assert shares.has_time("me", 50)
        shares.take("me", 0.4, 50)
    assert not shares.has_time("me", 50) and not shares.has_time("me", 50.5)
    assert shares.has_time("me", 51)


def test_clients_that_have_used_nothing_lately_are_forgotten() -> None:
    shares = TimeShares()
    for i in range(1000):
        shares.take(f"tenant {i}", 0.01, 50 + i)
    assert len(shares) < 5


def test_a_draft_whose_client_has_gone_takes_time_too() -> None:
    class SlowPlanner:
        """Plans for longer than a client waits; like that of a session, its thread ends first."""

        async def plan_draft(self, turn: Any, took: ThreadTime) -> None:
            def work() -> None:
                with took.measured():
                    until = time.thread_time() + 0.6
                    while time.thread_time() < until:
                        pass

            await finished(run_in(SESSIONS, work))

    async def run() -> None:
        nothing: Any = None
        planner: Any = SlowPlanner()
        prefetcher = Prefetcher(nothing, planner, nothing, nothing)
        turn: Any = SimpleNamespace(
            conversation=SimpleNamespace(using=nullcontext), request=SimpleNamespace(tenant="me")
        )
        task = asyncio.get_running_loop().create_task(prefetcher._planned(turn))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        now = asyncio.get_running_loop().time()
        assert task.cancelled() and not prefetcher._shares.has_time("me", now)

    asyncio.run(run())
