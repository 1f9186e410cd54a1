"""Lets a new conversation begin with a saved state where copies of blocks do not suffice.

On hybrid models and with sliding windows no slot can begin with rows alone: it needs the recurrent
state, or the window, at the position where they end. So the first conversation of a tenant with a
prefix that others may have decodes it up to its end, a boundary, and saves the slot there. Other
conversations that begin with the same tokens restore this state, and decode only their own text.
Those that start meanwhile wait for it instead of decoding the prefix, too.

Boundaries of a prompt are the starts of its first and its last user message, and the position up to
which it agrees with another conversation of the tenant. A state is shared only if each of its rows
was decoded with every earlier row in the cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from evoke_proxy.core.policy.turn import effective_config
from evoke_proxy.core.prompt.rendered import Tokens, common_prefix, has_media
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.server.prefill_progress import PrefillProgress
from evoke_proxy.engine.server.slot_queue import BackgroundLease
from evoke_proxy.engine.server.strategy import ServerResources
from evoke_proxy.engine.server.turn import TurnScope
from evoke_proxy.engine.strategies.budgeted.planner import Planner
from evoke_proxy.engine.strategies.budgeted.session_records import SessionPersistence
from evoke_proxy.engine.strategies.budgeted.slot_snapshots import SharedSlot, SlotSnapshots
from evoke_proxy.engine.strategies.budgeted.turn import RenderedTurn
from evoke_proxy.errors import UpstreamRejected

_log = logging.getLogger(__name__)
# Fewer tokens are decoded sooner than a state is found, verified and restored.
_MIN_TOKENS = 256
# Seconds between two attempts to lease a slot in which background work ends, or which is saved for
# another branch, and their number.
_POLL_S, _MAX_POLLS = 0.05, 200
# The most states that one request saves.
_MAX_BOUNDARIES = 4


@dataclass(eq=False, slots=True)
class _Boundary:
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
class _Start:
    """The first request of a conversation, from its lease to the end of its reply.

    Attributes:
        turn: the request.
        boundaries: the states that it is going to save, in ascending order.
        is_waiting: whether it waits for a state that another request is going to save.
    """

    turn: RenderedTurn
    boundaries: list[_Boundary] = field(default_factory=list)
    is_waiting: bool = False

    @property
    def tokens(self) -> Tokens:
        """Its prompt."""
        return self.turn.rendered.tokens

    @property
    def tenant(self) -> str:
        """Its tenant."""
        return self.turn.request.tenant


class SharedStates:
    """Saves and restores states at the boundaries of new conversations at one llama-server."""

    def __init__(
        self, server: ServerResources, planner: Planner, records: SessionPersistence
    ) -> None:
        """Without a directory for slots in `records` nothing is shared."""
        self._server = server
        self._planner = planner
        self._records = records
        self._snapshots = records.slot_snapshots
        self._starts: list[_Start] = []
        # States that will be saved, or are being written.
        self._pending: list[_Boundary] = []
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
        start = _Start(turn)
        scope.keep_open(self._running(start))
        slot = await self._snapshots.shared_slot(turn)
        try:
            await self._save_live(self._snapshots, start)
            n_restored = await self._restore(slot, start)
            progress = PrefillProgress(scope.trace, scope.turn.remembered, self._server.feed)
            with progress.following(slot.progress):
                n_decoded = await self._save(slot, start)
        finally:
            self._give_up(start.boundaries)
        if not n_restored and not start.boundaries:
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
        return "lora" not in turn.chat.keys and not has_media(turn.rendered.tokens)

    @contextmanager
    def _running(self, start: _Start) -> Iterator[None]:
        self._starts.append(start)
        try:
            yield
        finally:
            self._starts.remove(start)

    async def _save_live(self, snapshots: SlotSnapshots, start: _Start) -> None:
        """Save the idle slot of a conversation that a prompt continues: a branch of it begins.

        Its latest reply may be so recent that the slot was not saved yet.
        """
        turn = start.turn
        for view in turn.rendered.slots:
            parent = self._server.conversations.get(view.session)
            is_other = view.id != turn.slot and view.tenant == start.tenant
            if parent is None or not is_other:
                continue
            if view.n_common < max(parent.generation, _MIN_TOKENS):
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

    async def _restore(self, slot: SharedSlot, start: _Start) -> int:
        """Restore the longest state of a prompt, and announce the boundaries behind it.

        Returns the number of restored tokens; 0 when the slot has as many, or there is no state.
        Waits while another request is going to save a longer state. If that fails, the prompt has
        no boundaries, so that no request waits for one failure after the other.
        """
        view, is_recurrent = start.turn.view, self._server.monitor.server.is_recurrent
        # A slot with windows can be continued at its end; from which other positions is not stated.
        n_kept = view.n_continued if is_recurrent or view.n_common == view.n_tokens else 0
        has_failed = False
        while True:
            # A snapshot is not found while it is restored into another slot.
            async with self._restoring:
                match = await slot.find(start.tokens)
                end = max(n_kept, match.shared if match is not None else 0)
                pending = None if has_failed else self._awaited(start, end)
                if pending is None:
                    if not has_failed:
                        self._announce(start, end)
                    if match is None or match.shared < n_kept + _MIN_TOKENS:
                        return 0
                    return match.shared if await slot.restore(match) else 0
            start.is_waiting = True
            await pending.done.wait()
            start.is_waiting = False
            has_failed = pending.has_failed

    def _awaited(self, start: _Start, end: int) -> _Boundary | None:
        """The longest state of a prompt that another request is going to save.

        None when none has `_MIN_TOKENS` more than `end`.
        """
        best, most = None, end + _MIN_TOKENS - 1
        for boundary in self._pending:
            if boundary.tenant == start.tenant and most < boundary.end < len(start.tokens):
                if common_prefix(boundary.tokens, start.tokens) == boundary.end:
                    best, most = boundary, boundary.end
        return best

    def _announce(self, start: _Start, end: int) -> None:
        """Set the boundaries of a prompt behind its first `end` tokens; other requests see them."""
        turn, rendered = start.turn, start.turn.rendered
        if turn.conversation.ephemeral:
            return
        others = self._server.conversations.recent(start.tenant, turn.conversation)
        prompts = [each.tokens for each in others]
        prompts += [other.tokens for other in self._others(start)]
        common = max((common_prefix(tokens, start.tokens) for tokens in prompts), default=0)
        users = rendered.user_ends
        ends = {common}
        if len(users):
            ends |= {rendered.start_of(int(users[0])), rendered.start_of(int(users[-1]))}
        for at in sorted(ends):
            if self._add(start, end, at, at <= common):
                end = at

    def _add(self, start: _Start, end: int, at: int, is_expected: bool) -> bool:
        """Add a boundary at position `at`, if it is far enough behind `end` and fits the slot."""
        config = effective_config(start.turn.conversation.session.config, start.turn.chat)
        n_cells = self._server.monitor.server.n_slot_cells
        limits = (config.budget, n_cells, len(start.tokens) - 1)
        most = min(limit for limit in limits if limit is not None)
        if not end + _MIN_TOKENS <= at <= most:
            return False
        boundary = _Boundary(start.tenant, start.tokens[:at], is_expected)
        start.boundaries.append(boundary)
        self._pending.append(boundary)
        return True

    def _others(self, start: _Start) -> list[_Start]:
        """The other first requests of the same tenant that run now."""
        return [it for it in self._starts if it is not start and it.tenant == start.tenant]

    async def _save(self, slot: SharedSlot, start: _Start) -> int:
        """Decode up to each boundary and save the slot there; returns the tokens decoded.

        Requests that wait for a boundary may have more tokens in common: the end of these becomes a
        boundary, too.
        """
        n_decoded = 0
        for boundary in start.boundaries:  # may become longer meanwhile
            try:
                n_decoded += await slot.decode(boundary.tokens)
            except UpstreamRejected as error:
                _log.info("a prefix is not decoded for others: status %d", error.status)
                break
            waiting = [other for other in self._others(start) if other.is_waiting]
            ends = [common_prefix(other.tokens, start.tokens) for other in waiting]
            if boundary is start.boundaries[-1] and len(start.boundaries) < _MAX_BOUNDARIES:
                any(self._add(start, boundary.end, end, True) for end in sorted(ends))
            is_expected = boundary.is_expected or any(end >= boundary.end for end in ends)
            boundary.is_saved = await slot.save(boundary.tokens, is_expected)
            if boundary.is_saved:
                self._server.background.run(self._finish(slot, boundary), "sharing a state")
            else:
                self._give_up([boundary])
        return n_decoded

    async def _finish(self, slot: SharedSlot, boundary: _Boundary) -> None:
        """Let other requests use a state once its file is complete."""
        try:
            boundary.has_failed = not await slot.is_complete(boundary.tokens)
        finally:
            self._end(boundary)

    def _give_up(self, boundaries: Sequence[_Boundary]) -> None:
        """End the waiting for states that were not saved."""
        for boundary in boundaries:
            if not boundary.is_saved and not boundary.done.is_set():
                boundary.has_failed = True
                self._end(boundary)

    def _end(self, boundary: _Boundary) -> None:
        self._pending.remove(boundary)
        boundary.done.set()
