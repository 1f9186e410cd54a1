"""Editing large bodies: other threads run between short steps."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from evoke_proxy.core.request.json_edit import edit_top_level

_MIB = 1024 * 1024
_MESSAGE = b'{"role":"user","content":"%s"}'
# The longest CPU time of a thread without releasing the interpreter.
_LONGEST_S = 0.02
BODIES: dict[str, Callable[[], bytes]] = {
    "one string": lambda: _MESSAGE % (b"a" * (63 * _MIB)),
    "4,000 strings": lambda: b",".join([_MESSAGE % (b"a" * (63 * _MIB // 4000))] * 4000),
}


@pytest.fixture(autouse=True)
def _short_interval() -> Iterator[None]:
    """Sets the thread switch interval of the proxy."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.001)
    yield
    sys.setswitchinterval(before)


def longest_step(work: Callable[[], object]) -> float:
    """The longest CPU time of `work` in another thread while this one cannot run, in seconds."""
    may_begin, over = threading.Event(), threading.Event()

    def run() -> None:
        may_begin.wait()
        work()
        over.set()
        may_end.wait()

    may_end = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    longest, before = 0.0, time.clock_gettime(clock)
    may_begin.set()
    while not over.is_set():
        now = time.clock_gettime(clock)
        longest, before = max(longest, now - before), now
    may_end.set()
    thread.join()
    return longest


@pytest.mark.parametrize("name", BODIES)
def test_other_threads_run_during_an_edit(name: str) -> None:
    messages = BODIES[name]()
    body = b'{"id_slot":0,"evoke":false,"messages":[%s]}' % messages
    edited: list[bytes] = []

    def edit() -> None:
        edited[:] = [edit_top_level(body, {"id_slot": b"1"}, ("evoke",), ("evoke_keep",))]

    # The shortest of several runs: in any one of them this thread may lack a processor.
    assert min(longest_step(edit) for _ in range(5)) < _LONGEST_S
    assert edited == [b'{"id_slot":1,"messages":[%s]}' % messages]
