"""Requests at the servers of a pool are counted, and cancelled while they only wait."""

from __future__ import annotations

import asyncio

import pytest
from pool_fixtures import pool_gateway

from evoke_proxy.errors import UpstreamUnavailable


def test_a_request_stops_waiting_for_a_server_whose_breaker_opens() -> None:
    """The request is not passed on, even if its answer has just arrived or leaving takes long."""

    async def called_off() -> None:
        gateway = pool_gateway()
        answered, left, passed_on = asyncio.Event(), asyncio.Event(), False

        async def request() -> None:
            nonlocal passed_on

            async def opening() -> None:
                try:
                    await answered.wait()
                finally:
                    await left.wait()

            await gateway.requests.open(1, opening())
            passed_on = True

        async def ends(ended: type[BaseException]) -> None:
            task = asyncio.get_running_loop().create_task(request())
            await asyncio.sleep(0)
            answered.set()
            gateway.requests.cancel_openings(1)
            if ended is asyncio.CancelledError:
                task.cancel()
            await asyncio.sleep(0)
            gateway.requests.cancel_openings(1)
            left.set()
            with pytest.raises(BaseException) as error:
                await task
            assert error.type is ended and not passed_on and not gateway.requests._openings[1]
            answered.clear()
            left.clear()

        await ends(UpstreamUnavailable)
        await ends(asyncio.CancelledError)
        answered.set()
        left.set()
        await request()
        assert passed_on

    asyncio.run(called_off())


def test_a_request_is_counted_until_it_ends_however_it_ends() -> None:
    gateway = pool_gateway()
    member = gateway.servers.pool.members[1]
    with pytest.raises(ZeroDivisionError), gateway.requests.counted(1):
        with gateway.requests.counted(1):
            assert member.in_flight == 2
        assert member.in_flight == 1
        raise ZeroDivisionError
    assert member.in_flight == 0
