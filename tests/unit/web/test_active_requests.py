"""Counting running requests, and refusing new ones during a stop."""

from __future__ import annotations

import asyncio
import time

import pytest
import virtual_time

from evoke_proxy.errors import Draining
from evoke_proxy.web.active_requests import ActiveRequests


def test_requests_are_counted_until_they_end_however_they_end() -> None:
    requests = ActiveRequests(lambda: False)
    with requests.track():
        with pytest.raises(ValueError), requests.track():
            raise ValueError
        time.sleep(0.02)
        assert requests.idle_s == 0
    time.sleep(0.02)
    assert requests.idle_s >= 0.02


def test_a_stopping_proxy_refuses_requests_and_counts_none() -> None:
    requests = ActiveRequests(lambda: True)
    with pytest.raises(Draining), requests.track():
        pass
    time.sleep(0.01)
    assert requests.idle_s > 0


def test_a_stop_waits_for_the_last_request_up_to_its_limit() -> None:
    async def work() -> None:
        loop, requests = asyncio.get_running_loop(), ActiveRequests(lambda: False)

        async def answer(seconds: float) -> None:
            with requests.track():
                await asyncio.sleep(seconds)

        async with asyncio.TaskGroup() as tasks:
            for seconds in (1, 5, 60):
                tasks.create_task(answer(seconds))
            await asyncio.sleep(0)
            assert await requests.wait_until_idle(10) == 1
            assert loop.time() == pytest.approx(10)
            assert await requests.wait_until_idle(100) == 0
            assert loop.time() == pytest.approx(60)
        assert await requests.wait_until_idle(0) == 0

    virtual_time.run(work())
