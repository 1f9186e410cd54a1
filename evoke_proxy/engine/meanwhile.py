"""Computes values while llama-server works on a call, instead of before or after the call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from evoke_proxy.engine.gateway import RequestTrace

T = TypeVar("T")
# Callbacks of the event loop that send a small request.
STEPS_TO_SEND = 2


class Meanwhile(Generic[T]):
    """A value that is computed once the call that is made next has been sent.

    Create it directly before the call is awaited, and ask for `result` after it. The work must
    change nothing, because the call may fail. Its time is counted as `trace.beside_s`.
    """

    def __init__(self, work: Callable[[], T], trace: RequestTrace) -> None:
        self._work = work
        self._trace = trace
        self._steps_left = STEPS_TO_SEND
        self._done: list[T] = []
        self._handle = asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self._steps_left -= 1
        if self._steps_left >= 0:
            self._handle = asyncio.get_running_loop().call_soon(self._step)
            return
        with self._trace.beside(), suppress(Exception):  # `result` raises it
            self._done.append(self._work())

    def cancel(self) -> None:
        """Compute nothing, because the call has failed."""
        self._handle.cancel()

    def result(self) -> T:
        """Return the value; compute it now when the call has ended too soon."""
        self._handle.cancel()
        if not self._done:
            self._done.append(self._work())
        return self._done[0]
