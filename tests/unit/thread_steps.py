"""How long a computation keeps other threads from running."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from evoke_proxy.engine.server.session_worker import SWITCH_S


def longest_step(work: Callable[[], object]) -> float:
    """The longest CPU time of `work` in another thread while this one cannot run, in seconds.

    The thread switch interval is that of the proxy meanwhile.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        return _longest_step(work)
    finally:
        sys.setswitchinterval(before)


def _longest_step(work: Callable[[], object]) -> float:
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
