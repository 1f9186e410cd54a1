"""A session's own computation: a short one in the event loop, a long one in a thread.

A thread that computes in Python hands the interpreter over every `SWITCH_S`, so that the loop goes
on meanwhile; calls of libraries that hold the interpreter for long have no place in here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from evoke_proxy.engine.conversations import Conversation

T = TypeVar("T")

# What `web.serve` sets: how long the loop waits for a thread that computes.
SWITCH_S = 0.001
# Prompts of more tokens, of which fewer are new, are planned in a few milliseconds.
_MOST_NEW, _MOST_TOKENS = 4096, 65536
# Vectors that are taken in within a millisecond.
_MOST_VECTORS = 64
# Each that runs may take the interpreter once before the loop has it again.
_AT_ONCE = 4


class Computing:
    """Runs long computations, a few at a time, none twice for one conversation."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def run(self, known: Conversation, long: bool, work: Callable[[], T]) -> T:
        """The result of `work`, which may change the session of `known` and nothing else.

        When the caller is cancelled it is waited for all the same: the conversation is free only
        when nothing computes for it any more.
        """
        if not long:
            return work()
        async with self._room:
            known.computing = True
            try:
                return await _to_the_end(asyncio.get_running_loop().run_in_executor(None, work))
            finally:
                known.computing = False


def is_long(n_tokens: int, n_shared: int, n_vectors: int) -> bool:
    """Whether a prompt of so many tokens, so many of them shared with the last, is planned in a
    thread."""
    many = n_tokens - n_shared > _MOST_NEW or n_tokens > _MOST_TOKENS
    return many or n_vectors > _MOST_VECTORS


async def _to_the_end(work: asyncio.Future[T]) -> T:
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                continue
        raise
