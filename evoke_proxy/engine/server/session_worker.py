"""Runs computations on a session: short ones in the event loop, long ones in a thread.

A thread that runs Python code releases the interpreter lock every `SWITCH_S` seconds, so that the
event loop continues. Library calls that keep the lock for long must not run here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.slot_queue import finished
from evoke_proxy.thread_pools import SESSIONS, SESSIONS_AT_ONCE, run_in

T = TypeVar("T")

# The switch interval of the interpreter in seconds, which `web.serve` sets.
SWITCH_S = 0.001
# A prompt with at most this many new tokens, new messages, and tokens, is planned in a few
# milliseconds; in about 40 ms where its text is made to take long.
_MOST_NEW, _MOST_NEW_MESSAGES, _MOST_TOKENS = 2048, 64, 65536
# This many vectors are added to a session within a millisecond.
_MOST_VECTORS = 64
# Blocks are ranked for a query with this many terms in about 20 ms.
_MOST_TERMS = 64


class SessionWorker:
    """Runs computations on sessions; of the long ones SESSIONS_AT_ONCE at a time."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(SESSIONS_AT_ONCE)

    async def run(self, conversation: Conversation, long: bool, work: Callable[[], T]) -> T:
        """Return the result of `work`, which may change only the session of `conversation`.

        A `long` one runs in a thread. The work has ended when this returns or raises, even when the
        caller is cancelled.
        """
        if not long:
            async with conversation.worker_lock:
                return work()
        async with self._slots, conversation.worker_lock:
            return await finished(run_in(SESSIONS, work))


def is_long(n_tokens: int, n_shared: int, n_vectors: int, n_terms: int) -> bool:
    """Whether planning a prompt takes too long for the event loop.

    `n_shared` tokens are those of the previous prompt; `n_vectors` are added to the session. Its
    blocks are ranked for a query with `n_terms` different terms; 0 when they are not ranked.
    """
    many = n_tokens - n_shared > _MOST_NEW or n_tokens > _MOST_TOKENS
    return many or n_vectors > _MOST_VECTORS or has_many_terms(n_terms)


def has_many_messages(n_new: int) -> bool:
    """Whether planning a prompt with so many new messages takes too long for the event loop.

    Each is a block of its own, however few tokens it has.
    """
    return n_new > _MOST_NEW_MESSAGES


def has_many_terms(n_terms: int) -> bool:
    """Whether ranking blocks for a query with so many terms takes too long for the event loop."""
    return n_terms > _MOST_TERMS
