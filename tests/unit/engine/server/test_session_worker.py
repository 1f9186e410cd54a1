"""The session worker: long computations run in a thread, short ones on the event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from evoke_proxy.config import PolicyConfig
from evoke_proxy.core.session.session import Session
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.session_worker import (
    SWITCH_S,
    SessionWorker,
    has_many_messages,
    is_long,
)


@pytest.fixture(autouse=True)
def _switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    yield
    sys.setswitchinterval(before)


def conversation() -> Conversation:
    return Conversation(Session("s", "me", PolicyConfig()), np.zeros(0, np.int32))


def _count(n: int) -> int:
    return sum(1 for _ in range(n))


def test_a_long_computation_takes_little_time_of_the_event_loop() -> None:
    conversation_, worker = conversation(), SessionWorker()

    async def run(long: bool) -> float:
        start = time.thread_time()
        assert await worker.run(conversation_, long, lambda: _count(3_000_000)) == 3_000_000
        return time.thread_time() - start

    at_once, in_thread = asyncio.run(run(False)), asyncio.run(run(True))
    assert in_thread < at_once / 4, (in_thread, at_once)


def test_a_cancelled_computation_ends_before_its_conversation_is_unlocked() -> None:
    conversation_, worker = conversation(), SessionWorker()
    entered, leave, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        leave.wait(30)
        ended.set()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(worker.run(conversation_, True, work))
        await loop.run_in_executor(None, entered.wait, 30)
        for _ in range(3):  # the client disconnects, and the proxy stops
            task.cancel()
            await asyncio.sleep(0)
        assert conversation_.worker_lock.locked() and not task.done()
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set() and not conversation_.worker_lock.locked()

    asyncio.run(run())


def test_a_short_computation_is_not_run_in_a_thread() -> None:
    conversation_, own_thread = conversation(), threading.get_ident()
    assert asyncio.run(SessionWorker().run(conversation_, False, threading.get_ident)) == own_thread
    assert not is_long(32768, 32000, 8, 40)
    assert is_long(32768, 0, 0, 0) and is_long(32768, 32000, 1000, 0)
    assert is_long(131072, 131000, 0, 0) and is_long(500, 400, 0, 200)
    assert not is_long(4000, 2000, 0, 0) and is_long(4000, 1900, 0, 0)
    assert has_many_messages(100) and not has_many_messages(3)
