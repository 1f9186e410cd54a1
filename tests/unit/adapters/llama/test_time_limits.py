"""A time limit that delays of the event loop do not expire."""

from __future__ import annotations

import asyncio
import time

import pytest

from evoke_proxy.adapters.llama.time_limits import timeout_without_lag


def test_a_limit_without_lag_expires_after_its_time() -> None:
    async def waited() -> float:
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            async with timeout_without_lag(0.1):
                await asyncio.sleep(60)
        return time.monotonic() - start

    assert 0.1 <= asyncio.run(waited()) < 5

    async def in_time() -> int:
        async with timeout_without_lag(0.1):
            return len(asyncio.all_tasks())

    assert asyncio.run(in_time()) == 1
