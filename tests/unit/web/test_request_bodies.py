"""Reading request bodies: whole, and without long steps in the event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from evoke_proxy.web.request_bodies import _BodyBuffer

MIB = 1 << 20


def _collect(announced: int, parts: list[bytes]) -> bytes:
    buffer = _BodyBuffer(announced)
    for part in parts:
        buffer.write(part)
    assert buffer.size == sum(map(len, parts))
    return asyncio.run(buffer.whole())


@pytest.mark.parametrize(
    ("announced", "parts"),
    [
        (0, []),
        (0, [b"without ", b"a length"]),
        (0, [b"a" * MIB, b"b" * MIB]),
        (6, [b"ex", b"actly"[:4]]),
        (9, [b"less"]),
        (4, [b"more", b" than was announced"]),
        (4, [b"mor", b"e than was announced"]),
        (2 * MIB, [b"c" * MIB, b"d" * MIB, b"e" * MIB]),
    ],
)
def test_a_body_is_collected_whole_whatever_length_was_announced(
    announced: int, parts: list[bytes]
) -> None:
    assert _collect(announced, parts) == b"".join(parts)


def test_no_part_of_a_large_body_takes_long_to_add() -> None:
    part, n_parts = b"a" * (64 * 1024), 1000
    worst_s = []
    for _ in range(5):
        buffer, steps = _BodyBuffer(n_parts * len(part)), []
        for _ in range(n_parts):
            began = time.perf_counter()
            buffer.write(part)
            steps.append(time.perf_counter() - began)
        began = time.perf_counter()
        assert len(asyncio.run(buffer.whole())) == n_parts * len(part)
        worst_s.append(max(steps))
    # A buffer that grows is copied whole now and then, which takes 15 ms and more.
    assert min(worst_s) < 0.005
