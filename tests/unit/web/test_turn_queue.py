"""Requests begin in a bounded number per iteration of the event loop, by address in turn."""

from __future__ import annotations

import asyncio
import time

from evoke_proxy.web.turn_queue import LONG_S, TurnQueue


def _run(
    addresses: list[str], most: int, cancelled: int = 0, work_s: float = 0.0
) -> list[tuple[int, str]]:
    """The iteration and the address of each request in the order in which they begin.

    Each works for `work_s` seconds when it begins.
    """
    begun, now = list[tuple[int, str]](), [0]

    async def begin(queue: TurnQueue, address: str) -> None:
        await queue.wait(address)
        begun.append((now[0], address))
        time.sleep(work_s)

    async def run() -> None:
        queue = TurnQueue(most)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(begin(queue, address)) for address in addresses]
            await asyncio.sleep(0)
            for task in tasks[most : most + cancelled]:
                task.cancel()
            while not all(task.done() for task in tasks):
                now[0] += 1
                await asyncio.sleep(0)

    asyncio.run(run())
    return begun


def test_no_iteration_begins_more_requests_than_the_limit() -> None:
    begun = _run(["a"] * 50, 4)
    assert len(begun) == 50
    iterations = [at for at, _ in begun]
    assert max(iterations.count(at) for at in iterations) == 4


def test_one_request_begins_after_an_iteration_that_took_long() -> None:
    begun = _run(["a"] * 20, 4, work_s=1.5 * LONG_S)
    iterations = [at for at, _ in begun]
    assert len(begun) == 20
    assert max(iterations.count(at) for at in iterations[5:]) == 1


def test_addresses_take_turns_whatever_one_of_them_sends() -> None:
    order = [address for _, address in _run([*["flood"] * 50, "other"], 2)]
    assert order.index("other") <= 4


def test_a_disconnected_client_takes_no_turn() -> None:
    assert len(_run(["a"] * 20, 2, cancelled=18)) == 2


def test_a_client_that_disconnects_when_its_turn_comes_delays_nobody() -> None:
    begun = list[str]()

    async def run() -> None:
        queue = TurnQueue(1)
        await queue.wait("a")
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(queue.wait("a")) for _ in range(50)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # the first of them may begin now
            for _ in range(2):
                for task in waiting:
                    task.cancel()
        async with asyncio.timeout(1):
            for address in ("a", "b"):
                await queue.wait(address)
                begun.append(address)

    asyncio.run(run())
    assert begun == ["a", "b"]


def test_a_single_request_does_not_wait() -> None:
    assert _run(["a"], 1) == [(0, "a")]
