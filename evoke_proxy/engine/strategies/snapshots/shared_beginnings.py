"""Finds the beginnings of new conversations whose states are saved for others.

The first request of a conversation decodes its prompt in two steps where others may begin alike: up
to its first message of the user, or to where it agrees with another conversation of the tenant. The
slot is saved there, see `SlotPlacement`. Conversations that start meanwhile wait for this state.
"""

from __future__ import annotations

import asyncio
import logging

from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.core.prompt.rendered import Tokens, common_prefix
from evoke_proxy.core.request.look_ahead import openings
from evoke_proxy.engine.parsing.body_parsing import run_off_loop
from evoke_proxy.engine.server.conversations import Conversation, Conversations
from evoke_proxy.engine.strategies.beginnings import (
    MIN_SHARED_TOKENS,
    Beginning,
    Beginnings,
    PendingState,
)
from evoke_proxy.engine.strategies.snapshots.transfers import SnapshotTransfers
from evoke_proxy.errors import PromptTooLong, UpstreamRejected

_log = logging.getLogger(__name__)


class SharedBeginnings(Beginnings):
    """The first requests at one unpatched server, and the states that they will save."""

    def __init__(self, conversations: Conversations, transfers: SnapshotTransfers) -> None:
        super().__init__()
        self._conversations = conversations
        self._transfers = transfers

    async def begin(
        self, beginning: Beginning, conversation: Conversation, body: bytes, api: StockApi
    ) -> None:
        """Decide which states a first request saves for others, and announce them.

        Before that, waits while another request is going to save a longer one. If that fails, no
        state is announced, so that no request waits for one failure after the other. Raises
        UpstreamError.
        """
        start = await _start_of_user(body, beginning.tokens, api)
        try:
            await self._decide(beginning, conversation, start)
        finally:
            beginning.is_decided = True

    async def _decide(self, beginning: Beginning, conversation: Conversation, start: int) -> None:
        """See `begin`; the first message of the user begins at token `start`."""
        while True:
            match = self._transfers.find(beginning.tenant, beginning.tokens[:-1])
            end = match.shared if match is not None else 0
            pending = self.awaited(beginning, end)
            if pending is None:
                break
            await self.wait(beginning, pending)
            if pending.has_failed:
                return
        others = self._conversations.recent(beginning.tenant, conversation)
        common = self.common_end(beginning, (each.tokens for each in others))
        for at in sorted({start, min(common, len(beginning.tokens) - 1)}):
            if at >= end + MIN_SHARED_TOKENS:
                self.announce(beginning, at, at <= common)
                end = at

    def is_expected(self, beginning: Beginning, state: PendingState) -> bool:
        """Whether another conversation has the tokens of a state, as far as is known now."""
        others = (other.tokens for other in self.others(beginning))
        return state.is_expected or any(
            common_prefix(tokens, state.tokens) == state.end for tokens in others
        )

    async def finish(self, state: PendingState) -> None:
        """Let other requests use a state once its file is complete, or go on without it."""
        try:
            await self._transfers.seals_ended()
            match = self._transfers.find(state.tenant, state.tokens)
            state.has_failed = match is None or match.shared < state.end
        finally:
            self.end(state)


class RestoreLock:
    """Lets one request at a time restore a state for a new conversation.

    A snapshot is not found while nobody knows whether its restore was of use.
    """

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock
        self.is_locked = False

    async def take(self) -> None:
        """Wait until no other request has it."""
        await self._lock.acquire()
        self.is_locked = True

    def close(self) -> None:
        """Let the next request have it; does nothing the second time."""
        if self.is_locked:
            self.is_locked = False
            self._lock.release()


async def _start_of_user(body: bytes, prompt: Tokens, api: StockApi) -> int:
    """How many tokens a prompt has before the text of its first message of the user.

    0 without such a message, and when the chat template refuses it.
    """
    bodies = await run_off_loop(body, openings, body)
    if not bodies:
        return 0
    try:
        one, other = await asyncio.gather(*map(api.render, bodies))
    except (UpstreamRejected, PromptTooLong) as error:
        _log.debug("the beginning of a conversation is not rendered: %s", type(error).__name__)
        return 0
    return common_prefix(one[: common_prefix(one, other)], prompt)
