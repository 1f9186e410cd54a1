"""Measures how the CPU time of a function grows with the size of its input."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable

# A shorter time is noise of the clock, or a constant cost.
_LEAST_S = 0.002
_TRIES = 3
_PLAINLY_LINEAR, _PLAINLY_NOT = 1.2, 1.6


def exponent(run: Callable[[int], object], n: int, limit_s: float = 20.0) -> float:
    """The growth of processor time from inputs of `n` to those of 8 `n`; 0 where all are fast.

    Each time is the shortest of several, of this thread alone, and a growth that looks too fast is
    measured again, so a busy machine does not matter. A run that takes longer than `limit_s` is not
    repeated at larger sizes: of the sizes between, one run each shows whether it does. The garbage
    collector is off meanwhile: how often it runs depends on every object of the process.
    """
    found = math.inf
    gc.disable()
    try:
        for _ in range(_TRIES):
            found = min(found, _growth(run, n, limit_s))
            if not _PLAINLY_LINEAR < found < _PLAINLY_NOT:
                break
    finally:
        gc.enable()
    return found


def _growth(run: Callable[[int], object], n: int, limit_s: float) -> float:
    times: list[tuple[int, float]] = []
    for size in (n, 2 * n, 4 * n, 8 * n):
        seconds = _shortest(run, size, _TRIES if size in (n, 8 * n) else 1)
        if n < size < 8 * n and seconds > limit_s:
            seconds = min(seconds, _shortest(run, size, _TRIES - 1))
        times.append((size, seconds))
        if times[-1][1] > limit_s:
            break
    (small, first), (large, last) = times[0], times[-1]
    if last < _LEAST_S:
        return 0.0
    return math.log(last / max(first, _LEAST_S / 8)) / math.log(large / small)


def _shortest(run: Callable[[int], object], size: int, tries: int) -> float:
    found = math.inf
    for _ in range(tries):
        start = time.thread_time()
        run(size)
        found = min(found, time.thread_time() - start)
        if found > 1:  # no noise matters
            break
    return found
