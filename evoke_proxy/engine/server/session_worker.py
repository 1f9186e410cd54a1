"""A session's own computation: a short one in the event loop, a long one in a thread.

A thread that computes in Python hands the interpreter over every `SWITCH_S`, so that the loop goes
on meanwhile; calls of libraries that hold the interpreter for long have no place in here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from evoke_proxy.engine.server.conversations import Conversation

T = TypeVar("T")

# What `web.serve` sets: how long the loop waits for a thread that computes.
SWITCH_S = 0.001
# Prompts of more tokens, of which fewer are new, are planned in a few milliseconds.
_MOST_NEW, _MOST_TOKENS = 4096, 65536
# Vectors that are taken in within a millisecond.
_MOST_VECTORS = 64
# Each that runs may take the interpreter once before the loop has it again.
_AT_ONCE = 4


class SessionWorker:
    """Runs long computations, a few at a time."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def run(self, conversation: Conversation, long: bool, work: Callable[[], T]) -> T:
        """The result of `work`, which may change the session of `conversation` and nothing else."""
        if not long:
            return await conversation.computed(work, long)
        async with self._room:
            return await conversation.computed(work, long)


def is_long(n_tokens: int, n_shared: int, n_vectors: int) -> bool:
    """Whether a prompt of so many tokens, so many of them shared with the last, is planned in a
    thread."""
    many = n_tokens - n_shared > _MOST_NEW or n_tokens > _MOST_TOKENS
    return many or n_vectors > _MOST_VECTORS
