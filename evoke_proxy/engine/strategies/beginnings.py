"""Announces states at the beginnings of new conversations, so that others wait for them.

The first request of a conversation decodes its prompt up to a boundary, and saves the slot there.
Other conversations of the tenant that begin with the same tokens meanwhile wait for this state
instead of decoding them, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from evoke_proxy.core.prompt.rendered import Tokens, common_prefix

# Fewer tokens are decoded sooner than a state is found, verified and restored.
MIN_SHARED_TOKENS = 256


@dataclass(eq=False, slots=True)
class PendingState:
    """A state that a request is going to save.

    Attributes:
        tenant: the tenant that may use it.
        tokens: its tokens.
        is_expected: whether another conversation has these tokens.
        done: set when the state can be restored, and when it never will be.
        is_saved: whether llama-server has written it; its file may not be complete yet.
        has_failed: whether it will never be restored.
    """

    tenant: str
    tokens: Tokens
    is_expected: bool
    done: asyncio.Event = field(default_factory=asyncio.Event)
    is_saved: bool = False
    has_failed: bool = False

    @property
    def end(self) -> int:
        """The number of its tokens."""
        return len(self.tokens)


@dataclass(eq=False, slots=True)
class Beginning:
    """The first request of a conversation, from its lease to the end of its reply.

    Attributes:
        tenant: its tenant.
        tokens: its prompt.
        states: those that it is going to save, in ascending order.
        is_waiting: whether it waits for a state that another request is going to save.
        is_decided: whether it will wait for no state any more.
    """

    tenant: str
    tokens: Tokens
    states: list[PendingState] = field(default_factory=list)
    is_waiting: bool = False
    is_decided: bool = False


class Beginnings:
    """The first requests that run at one llama-server, and the states that they will save."""

    def __init__(self) -> None:
        self._running: list[Beginning] = []
        # States that will be saved, or are being written.
        self._pending: list[PendingState] = []

    @contextmanager
    def running(self, beginning: Beginning) -> Iterator[None]:
        """List a first request; the states that it has not saved end with it."""
        self._running.append(beginning)
        try:
            yield
        finally:
            self._running.remove(beginning)
            self.give_up(beginning.states)

    def others(self, beginning: Beginning) -> list[Beginning]:
        """The other first requests of the same tenant that run now."""
        return [it for it in self._running if it is not beginning and it.tenant == beginning.tenant]

    def n_that_wait(self, beginning: Beginning, state: PendingState) -> int:
        """The number of other requests that wait for a state of a request, or are going to."""
        others = (other.tokens for other in self.others(beginning) if not other.is_decided)
        return sum(common_prefix(tokens, state.tokens) == state.end for tokens in others)

    def awaited(self, beginning: Beginning, end: int) -> PendingState | None:
        """The longest state of a prompt that another request is going to save.

        None when none has `MIN_SHARED_TOKENS` more than `end`.
        """
        best, most = None, end + MIN_SHARED_TOKENS - 1
        for state in self._pending:
            if state.tenant == beginning.tenant and most < state.end < len(beginning.tokens):
                if common_prefix(state.tokens, beginning.tokens) == state.end:
                    best, most = state, state.end
        return best

    async def wait(self, beginning: Beginning, state: PendingState) -> None:
        """Wait until a state of another request can be restored, or never will be."""
        beginning.is_waiting = True
        try:
            await state.done.wait()
        finally:
            beginning.is_waiting = False

    def common_end(self, beginning: Beginning, prompts: Iterable[Tokens]) -> int:
        """How many of the first tokens of a prompt others have: running requests, or `prompts`."""
        others = [other.tokens for other in self.others(beginning)]
        lengths = (common_prefix(tokens, beginning.tokens) for tokens in (*prompts, *others))
        return max(lengths, default=0)

    def announce(self, beginning: Beginning, end: int, is_expected: bool) -> PendingState:
        """Add the state of the first `end` tokens to those that a request is going to save."""
        state = PendingState(beginning.tenant, beginning.tokens[:end], is_expected)
        beginning.states.append(state)
        self._pending.append(state)
        return state

    def give_up(self, states: Sequence[PendingState]) -> None:
        """End the waiting for states that were not saved."""
        for state in states:
            if not state.is_saved and not state.done.is_set():
                state.has_failed = True
                self.end(state)

    def end(self, state: PendingState) -> None:
        """End the waiting for a state: it can be restored, or it has failed."""
        self._pending.remove(state)
        state.done.set()
