"""Work that is done while a call of llama-server is under way."""

from __future__ import annotations

import asyncio

import pytest

from evoke_proxy.engine.gateway import RequestTrace
from evoke_proxy.engine.meanwhile import STEPS_TO_SEND, Meanwhile


def test_the_work_is_done_after_the_call_was_sent_and_before_it_ends() -> None:
    async def call(events: list[str]) -> None:
        async def send() -> None:
            events.append("sent")

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
        for _ in range(STEPS_TO_SEND):
            await asyncio.sleep(0)
        events.append("answered")

    async def scenario() -> tuple[list[str], float]:
        events, trace = list[str](), RequestTrace(0.0)
        meanwhile = Meanwhile(lambda: events.append("worked"), trace)
        await call(events)
        meanwhile.result()
        return events, trace.beside_s

    events, beside_s = asyncio.run(scenario())
    assert events == ["sent", "worked", "answered"] and beside_s > 0


def test_the_work_is_done_once_also_when_the_call_ends_at_once() -> None:
    async def scenario() -> list[int]:
        done = list[int]()

        def work() -> int:
            done.append(len(done))
            return len(done)

        meanwhile = Meanwhile(work, RequestTrace(0.0))
        assert meanwhile.result() == meanwhile.result() == 1
        for _ in range(STEPS_TO_SEND + 2):
            await asyncio.sleep(0)
        return done

    assert asyncio.run(scenario()) == [0]


def test_nothing_is_done_after_a_call_that_failed() -> None:
    async def scenario() -> list[int]:
        done = list[int]()
        Meanwhile(lambda: done.append(1), RequestTrace(0.0)).cancel()
        for _ in range(STEPS_TO_SEND + 2):
            await asyncio.sleep(0)
        return done

    assert asyncio.run(scenario()) == []


def test_an_error_of_the_work_is_raised_by_its_result() -> None:
    def work() -> None:
        raise ValueError("no value")

    async def scenario(steps: int) -> None:
        meanwhile = Meanwhile(work, RequestTrace(0.0))
        for _ in range(steps):
            await asyncio.sleep(0)
        meanwhile.result()

    for steps in (0, STEPS_TO_SEND + 2):
        with pytest.raises(ValueError, match="no value"):
            asyncio.run(scenario(steps))
