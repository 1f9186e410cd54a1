"""Reads large bodies in a thread, so that no client's body holds up the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# A body of more bytes, brackets or commas takes longer than a few milliseconds to read.
LARGE_BYTES = 256 * 1024
LARGE_BRACKETS = 2048
LARGE_COMMAS = 16384


def is_large(body: bytes) -> bool:
    """Whether reading a body may take longer than the event loop can wait."""
    return (
        len(body) > LARGE_BYTES
        or body.count(b"{") + body.count(b"[") > LARGE_BRACKETS
        or body.count(b",") > LARGE_COMMAS
    )


async def run_off_loop(body: bytes, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `read` returns or raises: called in a thread when the body it reads is large.

    A thread gives way to the event loop between any two steps of the interpreter, and while numpy
    works; the checks of a body bound what one step can take.
    """
    if is_large(body):
        return await asyncio.to_thread(read, *args, **kwargs)
    return read(*args, **kwargs)
