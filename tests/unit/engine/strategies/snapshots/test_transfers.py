"""Transfers of snapshots: waiting for work that others do."""

from __future__ import annotations

import asyncio

import pytest

from evoke_proxy.engine.strategies.snapshots.transfers import _resolve


def test_cancelled_work_resolves_its_future() -> None:
    async def work() -> bool:
        await asyncio.sleep(60)
        return True

    async def cancelled() -> bool:
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_resolve(future, work()), 0.01)
        return future.cancelled()

    assert asyncio.run(cancelled())
