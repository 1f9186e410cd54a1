"""Texts and evictions of the tests of modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llama import Json, Llama, running

from bench.random_models import SHAPES, ensure

CELLS, FIRST, BLOCK = 1024, 4, 64
OPTIONS = ("-c", str(CELLS), "--evoke-ram", "64", "-fa", "on")


@contextmanager
def evicting(mode: int, *more: str) -> Iterator[Llama]:
    options = (*OPTIONS, "--kv-eviction", str(mode), *more)
    with running(True, *options, model=ensure(SHAPES["tiny-dense"])) as server:
        yield server


def text(n_tokens: int, seed: int = 0) -> list[int]:
    return [10 + (7 * i + 13 * seed + i // 1900) % 1900 for i in range(n_tokens)]


def auto_evicted(answer: Json) -> list[list[object]]:
    listed: list[list[object]] = answer["timings"]["evoke"]["auto_evicted"]
    return listed


def spans(answer: Json) -> list[tuple[int, int]]:
    return [(int(str(p0)), int(str(p1))) for p0, p1, _ in auto_evicted(answer)]


def resident(ranges: Sequence[Sequence[int]], p0: int, p1: int) -> bool:
    return any(a <= p0 and p1 <= b for a, b in ranges)
