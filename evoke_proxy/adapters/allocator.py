"""Keeps the memory small that is free in this process: one heap, and pages that go back.

For the malloc of glibc; with others, both functions do nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_ARENA_MAX = -8  # of malloc.h


def use_one_heap() -> None:
    """Let threads that begin from now on allocate from the heap of the main thread.

    glibc makes more heaps, up to eight for each core, and keeps the free end of each, which
    `malloc_trim` does not return. Python's lock lets hardly two threads allocate at once. The
    variable MALLOC_ARENA_MAX of the operator comes first, and so does its tunable.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "MALLOC_ARENA_MAX" not in os.environ and "glibc.malloc.arena_max" not in tunables:
        _call("mallopt", ctypes.c_int(_M_ARENA_MAX), ctypes.c_int(1))


def return_free_pages() -> None:
    """Return free pages of the heap to the system, also those between memory in use.

    Took 0.1 to 16 ms for 50 MB, during which other threads cannot allocate.
    """
    _call("malloc_trim", ctypes.c_size_t(0))


def _call(name: str, *values: ctypes.c_int | ctypes.c_size_t) -> None:
    if sys.platform.startswith("linux"):
        function = getattr(ctypes.CDLL(None), name, None)  # musl has neither
        if function is not None:
            function(*values)
