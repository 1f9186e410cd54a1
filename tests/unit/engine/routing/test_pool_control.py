"""The control of a pool by operators: rows of servers, and draining."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pool_fixtures import pool_gateway, set_healthy

from evoke_proxy.errors import RequestError


def test_a_draining_server_saves_its_slots_after_its_last_answer(
    monkeypatch: Any,
) -> None:
    saved: list[int] = []

    async def keep() -> None:
        saved.append(1)

    async def drained(again: bool) -> list[int]:
        gateway = pool_gateway()
        saved.clear()
        monkeypatch.setattr(gateway.servers[1], "save_all", keep)
        async with gateway.pool_control._tasks as tasks:
            with gateway.requests.counted(1):
                assert gateway.pool_control.drain("b", True)["draining"]
                await asyncio.sleep(0.02)
                assert not saved, "the server still answers a request"
                if again:
                    gateway.pool_control.drain("b", False)
            await tasks.ended(())
            return list(saved)

    assert asyncio.run(drained(again=False)) == [1]
    assert asyncio.run(drained(again=True)) == [], "the server no longer drains"


def test_the_row_of_a_server_says_whether_it_takes_requests_and_when_it_is_tried_again() -> None:
    async def rows() -> None:
        gateway = pool_gateway()
        set_healthy(gateway, 0)
        control, pool = gateway.pool_control, gateway.servers.pool
        for _ in range(gateway.config.pool.failures):
            pool.check_failed(1, asyncio.get_running_loop().time())
        pool.fingerprint_read(0, "abc")
        well, away = control.rows()
        assert control.has_available and (well["takes"], away["takes"]) == (True, False)
        assert (well["state"], well["fingerprint"], well["retry_in_s"]) == ("is well", "abc", None)
        assert away["state"] == "is away" and away["retry_in_s"] > 0
        pool.drain(0, True)
        assert control.row(0)["state"] == "drains" and not control.has_available
        with pytest.raises(RequestError, match="no server is called 'c': a, b"):
            control.drain("c", True)

    asyncio.run(rows())
