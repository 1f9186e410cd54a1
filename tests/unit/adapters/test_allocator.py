"""Threads share one heap, and its free pages go back to the system."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from evoke_proxy.adapters import allocator

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only with glibc"
)

MANY_THREADS = """
import ctypes, os, threading
from evoke_proxy.adapters.allocator import use_one_heap
if {used}: use_one_heap()
together = threading.Barrier(4)
def work(): together.wait(); kept = [bytearray(1000) for _ in range(100)]; together.wait()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
ctypes.CDLL(None).malloc_stats()
"""


def n_heaps(*, used: bool, **variables: str) -> int:
    """How many heaps malloc has after four threads allocated at once."""
    code, without = MANY_THREADS.format(used=used), ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
    environment = {name: value for name, value in os.environ.items() if name not in without}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, check=True
    )
    return done.stderr.count("Arena ")


def test_all_threads_allocate_from_one_heap() -> None:
    assert n_heaps(used=False) > 1
    assert n_heaps(used=True) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_ARENA_MAX", "3"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=3")],
)
def test_a_number_of_heaps_that_the_operator_sets_comes_first(name: str, value: str) -> None:
    assert n_heaps(used=True, **{name: value}) == 3


FREE_PAGES = """
import re
from evoke_proxy.adapters.allocator import return_free_pages
def mib(): return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
before, pieces, kept = mib(), [], []
for _ in range(1000):
    pieces.append(bytearray(100_000))
    kept.append(bytearray(1000))
del pieces
free = mib() - before
return_free_pages()
print(free, mib() - before)
"""


def test_free_pages_between_memory_in_use_go_back_to_the_system() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FREE_PAGES], capture_output=True, text=True, check=True
    )
    free, left = map(int, done.stdout.split())
    assert free > 80 and left < 20


def test_other_implementations_of_malloc_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[object]()

    def without_functions(library: object) -> object:
        opened.append(library)
        return object()

    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", without_functions)
    allocator.use_one_heap()
    allocator.return_free_pages()
    assert opened == [None, None], "both look for the function in this process"
