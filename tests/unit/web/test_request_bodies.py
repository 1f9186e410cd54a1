"""Reading request bodies: whole, and without long steps in the event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from evoke_proxy.web.request_bodies import joined

MIB = 1 << 20


@pytest.mark.parametrize(
    "parts", [[], [b"one"], [b"two ", b"parts"], [b"a" * MIB, b"b" * MIB, b"c"]]
)
def test_the_parts_of_a_body_are_joined_and_released(parts: list[bytes]) -> None:
    expected = b"".join(parts)
    assert asyncio.run(joined(parts, len(expected))) == expected
    assert len(expected) < MIB or not parts, "the parts of a large body must not stay in memory"


async def _longest_pause(work: asyncio.Task[bytes]) -> float:
    """Seconds that the event loop was longest unable to run while a task ran."""
    longest, before = 0.0, time.perf_counter()
    while not work.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    return longest


def test_joining_a_large_body_does_not_stall_the_event_loop() -> None:
    async def pause() -> float:
        parts = [b"a" * (64 * 1024)] * 2000
        task = asyncio.get_running_loop().create_task(joined(parts, 2000 * 64 * 1024))
        longest = await _longest_pause(task)
        assert len(task.result()) == 2000 * 64 * 1024
        return longest

    began = time.perf_counter()
    whole = b"".join([b"a" * (64 * 1024)] * 2000)
    at_once_s = time.perf_counter() - began
    del whole
    # Joining in the event loop pauses it for as long as the copy takes.
    assert min(asyncio.run(pause()) for _ in range(5)) < max(0.005, at_once_s / 2)
