"""The threads that blocking work runs in, by what it waits for.

A pool runs its work in the order of arrival. Work that can take long has pools of its own, so that
neither a slow disk nor large requests keep anything else waiting. `asyncio.to_thread`, whose
threads are few on a small machine, is for calculations of milliseconds only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Reads and writes of files: these threads mostly wait, some of them for llama-server, which may be
# reading the same file.
DISK = ThreadPoolExecutor(8, "disk")
# Parsing, checking and editing of request bodies. Each holds a parsed copy of a body, and the
# interpreter runs one thread at a time, so more threads would not be faster.
_BODIES = ThreadPoolExecutor(2, "bodies")
# A body of more bytes takes tenths of a second. It does not keep smaller ones waiting.
_HUGE_BYTES = 4 * 1024 * 1024
_HUGE_BODIES = ThreadPoolExecutor(1, "huge-bodies")
# Long computations on sessions; each may delay the event loop by one switch of threads.
SESSIONS_AT_ONCE = 4
SESSIONS = ThreadPoolExecutor(SESSIONS_AT_ONCE, "sessions")


def for_body(n_bytes: int) -> Executor:
    """Return the pool for work on a request body of this size."""
    return _HUGE_BODIES if n_bytes > _HUGE_BYTES else _BODIES


def run_in(
    pool: Executor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> asyncio.Future[T]:
    """Queue `work(*args, **kwargs)` for a thread of the pool; the future has what it returns.

    The call has the context variables of the caller, as with `asyncio.to_thread`. Cancelling the
    future drops a call that has not begun, and does not end one that has.
    """
    call = partial(copy_context().run, work, *args, **kwargs)
    return asyncio.get_running_loop().run_in_executor(pool, call)
