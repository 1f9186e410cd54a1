"""Lets a new conversation begin with a saved state where copies of blocks do not suffice.

On hybrid models and with sliding windows no slot can begin with rows alone: it needs the recurrent
state, or the window, at the position where they end. So the first conversation of a tenant with a
prefix that others may have decodes it up to its end, a boundary, and saves the slot there. Other
conversations that begin with the same tokens restore this state, and decode only their own text.
Those that start meanwhile wait for it instead of decoding the prefix, too.

Boundaries of a prompt are the starts of its first and its last user message, and the position up to
which it agrees with another conversation of the tenant. A state is shared only if each of its rows
was decoded with every earlier row in the cache. So none is longer than the budget, and of a longer
prefix only as much is shared. None has an image or a sound.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from evoke_proxy.core.policy.turn import effective_config
from evoke_proxy.core.prompt.rendered import common_prefix
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.prefill_progress import PrefillProgress
from evoke_proxy.engine.server.slot_queue import BackgroundLease
from evoke_proxy.engine.server.strategy import ServerResources
from evoke_proxy.engine.server.turn import TurnScope
from evoke_proxy.engine.strategies.beginnings import (
    MIN_SHARED_TOKENS,
    Beginning,
    Beginnings,
    PendingState,
)
from evoke_proxy.engine.strategies.budgeted.planner import Planner
from evoke_proxy.engine.strategies.budgeted.session_records import SessionPersistence
from evoke_proxy.engine.strategies.budgeted.slot_snapshots import SharedSlot, SlotSnapshots
from evoke_proxy.engine.strategies.budgeted.turn import RenderedTurn
from evoke_proxy.errors import UpstreamRejected

_log = logging.getLogger(__name__)
# Seconds between two attempts to lease a slot in which background work ends, or which is saved for
# another branch, and their number.
_POLL_S, _MAX_POLLS = 0.05, 200
# The most states that one request saves.
_MAX_BOUNDARIES = 4


class SharedStates:
    """Saves and restores states at the boundaries of new conversations at one llama-server."""

    def __init__(
        self, server: ServerResources, planner: Planner, records: SessionPersistence
    ) -> None:
        """Without a directory for slots in `records` that can be used, nothing is shared."""
        self._server = server
        self._planner = planner
        self._records = records
        self._snapshots = records.slot_snapshots
        self._beginnings = Beginnings()
        # Held while a state is looked up and restored.
        self._restoring = asyncio.Lock()

    async def adopt(self, turn: RenderedTurn, scope: TurnScope) -> RenderedTurn:
        """Return the turn after its slot was given the longest shared state of its prompt.

        Also saves the states at its boundaries. Returns `turn` itself for a conversation with
        turns, and where nothing is shared. The number of tokens that were decoded up to the last
        boundary goes into `scope.turn`. Raises UpstreamError.
        """
        if self._snapshots is None or not self._applies(turn):
            return turn
        if self._snapshots.saving.problem is not None:
            return turn
        start = Beginning(turn.request.tenant, turn.rendered.tokens)
        scope.keep_open(self._beginnings.running(start))
        slot = await self._snapshots.shared_slot(turn)
        try:
            await self._save_live(self._snapshots, turn)
            n_restored = await self._restore(slot, turn, start)
            progress = PrefillProgress(scope.trace, scope.turn.remembered, self._server.feed)
            with progress.following(slot.progress):
                n_decoded = await self._save(slot, turn, start)
        finally:
            self._beginnings.give_up(start.states)
        if not n_restored and not start.states:
            return turn
        scope.turn = replace(scope.turn, n_prefilled=n_decoded)
        scope.trace.stage = "render"
        turn = await self._planner.rendered_anew(turn)
        turn.conversation.budgeted.slot_restored(turn.view.epoch, n_restored, is_whole=True)
        if n_restored:
            self._server.metrics.shared.inc(n_restored)
            _log.info(
                "session %s begins with a state of %d tokens that another conversation has saved",
                turn.conversation.id,
                n_restored,
            )
        return turn

    def _applies(self, turn: RenderedTurn) -> bool:
        """Whether a turn is the first of its conversation, and may begin with a saved state."""
        session = turn.conversation.session
        is_new = not session.turns and not len(session.tokens)
        if not is_new or not self._server.monitor.server.needs_full_state:
            return False
        # A state under the adapters of one request is not that of other requests.
        return "lora" not in turn.chat.keys

    async def _save_live(self, snapshots: SlotSnapshots, turn: RenderedTurn) -> None:
        """Save the idle slot of a conversation that a prompt continues: a branch of it begins.

        Its latest reply may be so recent that the slot was not saved yet.
        """
        for view in turn.rendered.slots:
            parent = self._server.conversations.get(view.session)
            is_other = view.id != turn.slot and view.tenant == turn.request.tenant
            if parent is None or not is_other:
                continue
            if view.n_common < max(parent.generation, MIN_SHARED_TOKENS):
                continue
            lease = await self._lease(view.id, parent)
            if lease is not None:
                async with lease:
                    await self._records.save_displaced(parent, turn.calls, lease)
                await snapshots.saves_ended()

    async def _lease(self, slot: int, parent: Conversation) -> BackgroundLease | None:
        """Lease the slot of another conversation; None when a request has it.

        Background work in it, or a save for another branch, may take seconds.
        """
        for _ in range(_MAX_POLLS):
            lease = self._server.slots.background(slot, parent.id, alone=False)
            if lease is not None or parent.in_use:
                return lease
            await asyncio.sleep(_POLL_S)
        return None

    async def _restore(self, slot: SharedSlot, turn: RenderedTurn, start: Beginning) -> int:
        """Restore the longest state of a prompt, and announce the boundaries behind it.

        Returns the number of restored tokens; 0 when the slot has as many, or there is no state.
        Waits while another request is going to save a longer state. If that fails, the prompt has
        no boundaries, so that no request waits for one failure after the other.
        """
        view, is_recurrent = turn.view, self._server.monitor.server.is_recurrent
        # A slot with windows can be continued at its end; from which other positions is not stated.
        n_kept = view.n_continued if is_recurrent or view.n_common == view.n_tokens else 0
        has_failed = False
        while True:
            # A snapshot is not found while it is restored into another slot.
            async with self._restoring:
                match = await slot.find(start.tokens)
                end = max(n_kept, match.shared if match is not None else 0)
                pending = None if has_failed else self._beginnings.awaited(start, end)
                if pending is None:
                    if not has_failed:
                        self._announce(turn, start, end)
                    if match is None or match.shared < n_kept + MIN_SHARED_TOKENS:
                        return 0
                    return match.shared if await slot.restore(match) else 0
            await self._beginnings.wait(start, pending)
            has_failed = pending.has_failed

    def _announce(self, turn: RenderedTurn, start: Beginning, end: int) -> None:
        """Set the boundaries of a prompt behind its first `end` tokens; other requests see them."""
        rendered = turn.rendered
        if turn.conversation.ephemeral:
            return
        others = self._server.conversations.recent(start.tenant, turn.conversation)
        common = self._beginnings.common_end(start, (each.tokens for each in others))
        users = rendered.user_ends
        ends = {common}
        if len(users):
            ends |= {rendered.start_of(int(users[0])), rendered.start_of(int(users[-1]))}
        most = self._longest(turn)
        for at in sorted({min(end, most) for end in ends}):
            if at >= end + MIN_SHARED_TOKENS:
                self._beginnings.announce(start, at, at <= common)
                end = at

    def _longest(self, turn: RenderedTurn) -> int:
        """The most tokens of a state: what the slot may keep, without an image."""
        rendered = turn.rendered
        config = effective_config(turn.conversation.session.config, turn.chat)
        limits = (
            config.budget,
            self._server.monitor.server.n_slot_cells,
            rendered.media[0].start if rendered.media else None,
            len(rendered.tokens) - 1,
        )
        return min(limit for limit in limits if limit is not None)

    async def _save(self, slot: SharedSlot, turn: RenderedTurn, start: Beginning) -> int:
        """Decode up to each boundary and save the slot there; returns the tokens decoded.

        Requests that wait for a boundary may have more tokens in common: the end of these becomes a
        boundary, too.
        """
        n_decoded, longest = 0, self._longest(turn)
        for state in start.states:  # may become longer meanwhile
            try:
                n_decoded += await slot.decode(state.tokens)
            except UpstreamRejected as error:
                _log.info("a prefix is not decoded for others: status %d", error.status)
                break
            waiting = [other for other in self._beginnings.others(start) if other.is_waiting]
            ends = [common_prefix(other.tokens, start.tokens) for other in waiting]
            if state is start.states[-1] and len(start.states) < _MAX_BOUNDARIES:
                longer = sorted(min(end, longest) for end in ends)
                at = next((it for it in longer if it >= state.end + MIN_SHARED_TOKENS), None)
                if at is not None:
                    self._beginnings.announce(start, at, True)
            is_expected = state.is_expected or any(end >= state.end for end in ends)
            state.is_saved = await slot.save(state.tokens, is_expected)
            if state.is_saved:
                self._server.background.run(self._finish(slot, state), "sharing a state")
            else:
                self._beginnings.give_up([state])
        return n_decoded

    async def _finish(self, slot: SharedSlot, state: PendingState) -> None:
        """Let other requests use a state once its file is complete."""
        try:
            state.has_failed = not await slot.is_complete(state.tokens)
        finally:
            self._beginnings.end(state)
