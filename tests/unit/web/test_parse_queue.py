"""Steps of parsing take a part of each iteration of the event loop, by address in turn."""

from __future__ import annotations

import asyncio
import time

import pytest

from evoke_proxy.web.parse_queue import MOST_S, ParseQueue


def _run(addresses: list[str], step_s: float, most_s: float) -> list[tuple[int, str]]:
    """The iteration and the address of each step in the order in which they run."""
    steps, now = list[tuple[int, str]](), [0]

    async def run() -> None:
        queue = ParseQueue(most_s)

        def step(address: str) -> None:
            time.sleep(step_s)
            steps.append((now[0], address))

        for address in addresses:
            queue.add(address, lambda address=address: step(address))  # type: ignore[misc]
        while len(steps) < len(addresses):
            now[0] += 1
            await asyncio.sleep(0)

    asyncio.run(run())
    return steps


def test_an_iteration_begins_no_step_after_its_time() -> None:
    iterations = [at for at, _ in _run(["a"] * 20, 0.002, 0.003)]
    assert len(iterations) == 20
    assert max(iterations.count(at) for at in iterations) <= 2


def test_an_iteration_runs_one_step_that_takes_half_a_millisecond() -> None:
    """All that others do takes several iterations, in which the handlers of the steps run, too."""
    iterations = [at for at, _ in _run(["a", "b"] * 10, 0.0005, MOST_S)]
    assert len(set(iterations)) == 20


def test_addresses_take_turns_whatever_one_of_them_sends() -> None:
    order = [address for _, address in _run([*["flood"] * 50, "other"], 0.0, 1.0)]
    assert order.index("other") == 1


def test_a_step_that_adds_the_next_one_runs_in_turn_with_others() -> None:
    order = list[str]()

    async def run() -> None:
        queue = ParseQueue(1.0)

        def step(name: str, left: int) -> None:
            order.append(name)
            if left:
                queue.add("same address", lambda: step(name, left - 1))

        for name in ("a", "b"):
            queue.add("same address", lambda name=name: step(name, 2))  # type: ignore[misc]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert order == ["a", "b"] * 3


def test_steps_run_after_one_that_fails() -> None:
    async def run() -> None:
        loop, queue, has_run = asyncio.get_running_loop(), ParseQueue(), asyncio.Event()
        failures = list[object]()
        loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
        queue.add("a", lambda: pytest.fail("a step that fails"))
        queue.add("b", has_run.set)
        async with asyncio.timeout(5):
            await has_run.wait()
        assert len(failures) == 1

    asyncio.run(run())
