"""The event loop serves few connections at a time, and all of them in turn."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from evoke_proxy.web.event_loop import _EVENTS_PER_STEP, FairSelector, new_event_loop, run

N_READY = 5 * _EVENTS_PER_STEP + 3


@pytest.fixture
def readable() -> Iterator[list[socket.socket]]:
    """Sockets that always have a byte to read."""
    pairs = [socket.socketpair() for _ in range(N_READY)]
    for ours, theirs in pairs:
        ours.setblocking(False)
        theirs.send(b"a")
    yield [ours for ours, _ in pairs]
    for pair in pairs:
        for end in pair:
            end.close()


def test_every_ready_file_is_returned_equally_often(readable: list[socket.socket]) -> None:
    with FairSelector() as selector:
        for ours in readable:
            selector.register(ours, 1)
        counts: Counter[int] = Counter()
        for _ in range(2 * N_READY):
            ready = selector.select(0)
            assert len(ready) == _EVENTS_PER_STEP
            counts.update(key.fd for key, _ in ready)
        assert len(counts) == N_READY
        assert max(counts.values()) - min(counts.values()) <= 1


def test_a_file_that_becomes_ready_waits_one_turn_of_the_others(
    readable: list[socket.socket],
) -> None:
    late = readable.pop()
    with FairSelector() as selector:
        for ours in readable:
            selector.register(ours, 1)
        for _ in range(7):
            selector.select(0)
        selector.register(late, 1)
        n_calls = 1
        while late.fileno() not in {key.fd for key, _ in selector.select(0)}:
            n_calls += 1
        assert n_calls <= N_READY // _EVENTS_PER_STEP + 1


def test_timers_run_between_the_connections(readable: list[socket.socket]) -> None:
    loop = new_event_loop()
    step_s, lateness = 0.002, []
    for ours in readable:
        loop.add_reader(ours, time.sleep, step_s)

    def tick(due: float) -> None:
        lateness.append(loop.time() - due)
        if len(lateness) < 10:
            loop.call_at(loop.time(), tick, loop.time())
        else:
            loop.stop()

    loop.call_soon(tick, loop.time())
    loop.run_forever()
    loop.close()
    # All connections together take 83 times as long as one.
    assert sorted(lateness)[5] < step_s * N_READY / 2


def test_the_result_of_the_proxy_is_returned() -> None:
    async def main() -> str:
        await asyncio.sleep(0)
        return type(asyncio.get_running_loop()).__name__

    assert "SelectorEventLoop" in run(main())
