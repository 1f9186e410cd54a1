"""Processes large bodies in a thread, so that they do not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# A body with more bytes, brackets or commas takes more than a few milliseconds to parse.
LARGE_BYTES = 256 * 1024
LARGE_BRACKETS = 2048
LARGE_COMMAS = 16384


def is_large(body: bytes) -> bool:
    """Whether parsing a body may take too long for the event loop."""
    return (
        len(body) > LARGE_BYTES
        or body.count(b"{") + body.count(b"[") > LARGE_BRACKETS
        or body.count(b",") > LARGE_COMMAS
    )


async def run_off_loop(body: bytes, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `read(*args, **kwargs)`, called in a thread when `body` is large.

    The thread yields to the event loop between steps of the interpreter and while numpy runs; the
    checks of bodies limit what one step can take.
    """
    if is_large(body):
        return await asyncio.to_thread(read, *args, **kwargs)
    return read(*args, **kwargs)
