from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from concurrent.futures import Executor
from contextvars import ContextVar

import pytest

from evoke_proxy.thread_pools import (
    DISK,
    SESSIONS,
    for_body,
    run_in,
)

_MIB = 1024 * 1024
POOLS = {
    "disk": DISK,
    "bodies": for_body(_MIB),
    "huge bodies": for_body(64 * _MIB),
    "sessions": SESSIONS,
    "short calculations": None,
}
_name: ContextVar[str] = ContextVar("name")


async def _run(pool: Executor | None) -> int:
    """Runs a call in a pool, in that of `asyncio.to_thread` without one."""
    if pool is None:
        return await asyncio.to_thread(threading.get_ident)
    return await run_in(pool, threading.get_ident)


@pytest.mark.parametrize("name", [name for name in POOLS if name != "short calculations"])
def test_a_pool_whose_threads_all_wait_delays_no_other(name: str) -> None:
    """As when the disk hangs, or when clients send as many large bodies as there may be."""
    pool, may_end = POOLS[name], threading.Event()
    assert pool is not None

    async def run() -> Iterable[int]:
        waiting = [run_in(pool, may_end.wait, 30.0) for _ in range(64)]
        try:
            others = [other for other in POOLS.values() if other is not pool]
            async with asyncio.timeout(10.0):
                found = [await _run(other) for other in others]
            assert not any(one.done() for one in waiting)
        finally:
            may_end.set()
            await asyncio.gather(*waiting)
        return found

    assert len(set(asyncio.run(run()))) == len(POOLS) - 1


def test_a_call_has_the_context_of_its_caller_and_raises_to_it() -> None:
    def fails(text: str) -> None:
        raise ValueError(f"{_name.get()} {text}")

    async def run() -> None:
        _name.set("caller")
        await run_in(DISK, fails, text="called")

    with pytest.raises(ValueError, match="caller called"):
        asyncio.run(run())


def test_a_cancelled_call_that_has_not_begun_is_dropped() -> None:
    may_end, begun = threading.Event(), list[str]()

    async def run() -> None:
        huge = for_body(64 * _MIB)  # one thread
        first = run_in(huge, may_end.wait, 30.0)
        second = run_in(huge, begun.append, "second")
        second.cancel()
        await asyncio.sleep(0.01)  # the pool is told in a later iteration of the event loop
        may_end.set()
        assert await first
        await run_in(huge, begun.append, "third")

    asyncio.run(run())
    assert begun == ["third"]
