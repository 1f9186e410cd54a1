"""Background tasks: their failures are logged, and leaving the context waits for them."""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings

import pytest
import virtual_time

from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.errors import EvokeError


async def _sleep(seconds: float, ended: list[float] | None = None) -> None:
    await asyncio.sleep(seconds)
    if ended is not None:
        ended.append(seconds)


async def _fail(error: Exception) -> None:
    raise error


def test_leaving_the_context_waits_for_all_tasks() -> None:
    async def work() -> list[float]:
        ended: list[float] = []
        async with BackgroundTasks() as background:
            for seconds in (3.0, 1.0):
                background.run(_sleep(seconds, ended), "a nap")
            assert background.busy
        assert not background.busy
        return ended

    assert virtual_time.run(work()) == [1.0, 3.0]


def test_a_failed_task_is_logged_and_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> tuple[list[EvokeError], list[float]]:
        failures: list[EvokeError] = []
        ended: list[float] = []
        async with BackgroundTasks(failures.append) as background:
            background.run(_sleep(1, ended), "a nap")
            background.run(_fail(EvokeError("no room")), "saving")
            background.run(_fail(KeyError("x")), "reading")
        return failures, ended

    with caplog.at_level(logging.WARNING):
        failures, ended = virtual_time.run(work())
    assert [str(error) for error in failures] == ["no room"] and ended == [1]
    saving, reading = caplog.records
    assert (saving.getMessage(), saving.exc_info) == ("saving failed: no room", None)
    assert reading.getMessage() == "reading failed" and reading.exc_info is not None


@pytest.mark.filterwarnings("error")
def test_a_task_cancelled_before_it_starts_leaves_nothing_behind() -> None:
    async def work() -> None:
        async with BackgroundTasks() as background:
            background.run(_sleep(1), "a nap").cancel()
            await background.ended(())
            assert not background.busy

    virtual_time.run(work())


def test_waiting_for_the_end_includes_tasks_that_tasks_start_and_excludes_the_named() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        async with BackgroundTasks() as background:

            async def starts_another() -> None:
                await asyncio.sleep(1)
                background.run(_sleep(2), "the second")

            long = background.run(_sleep(50), "long work")
            background.run(starts_another(), "the first")
            await background.ended([long])
            assert loop.time() == pytest.approx(3) and not long.done()

    virtual_time.run(work())


def test_a_task_after_the_context_was_left_is_refused_and_leaves_nothing_behind() -> None:
    async def work() -> None:
        async with BackgroundTasks() as background:
            pass
        nap = _sleep(1)
        with pytest.raises(RuntimeError), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                background.run(nap, "a nap")
            finally:
                nap.close()
                gc.collect()
        assert [str(warning.message) for warning in warned] == []

    virtual_time.run(work())
