"""Prepares the slot of a request, and records what its reply leaves there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from evoke_proxy.adapters.llama.stock_api import PrefillResult, StockApi
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.core.model.counts import seconds_of
from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.request.look_ahead import STEP, kind_of
from evoke_proxy.core.snapshots.costs import cost_of
from evoke_proxy.core.snapshots.placement import Placement, Situation, decide, slot_to_name
from evoke_proxy.core.snapshots.slot_contents import SlotContents, SlotStatus, has_restarted
from evoke_proxy.core.snapshots.snapshots import Match
from evoke_proxy.engine.gateway import Outcome
from evoke_proxy.engine.server.conversations import Conversation, Conversations
from evoke_proxy.engine.server.slot_queue import SlotLease, SlotQueue, until_over
from evoke_proxy.engine.server.turn import PreparedTurn, TurnScope
from evoke_proxy.engine.storage.snapshot_repository import SnapshotLabel
from evoke_proxy.engine.strategies.snapshots.server_probe import ServerProbe
from evoke_proxy.engine.strategies.snapshots.transfers import SnapshotTransfers
from evoke_proxy.errors import UpstreamError, UpstreamRejected

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class SnapshotTurn(PreparedTurn):
    """A prepared turn, with the values that `record_reply` and decoding ahead need."""

    chat: ChatRequest
    # The body as a chat, converted from the dialect of the client.
    body: bytes
    prompt: Tokens
    # The first tokens of `prompt`, with which the next turn begins, too.
    boundary: Tokens
    # The branch of snapshots that the turn continues.
    branch: str = ""
    # The slot that the request names; None where llama-server chooses.
    slot: int | None = None
    # The snapshot that was restored, until its use is known.
    restored: Match | None = None
    # Contents that the RAM cache is predicted to have, and the number of tokens that they share.
    predicted_ram: SlotContents | None = None
    predicted_tokens: int = 0
    # The slots before the turn; None where the server does not list them.
    slots_before: Sequence[SlotStatus] | None = None
    # See `SlotContents.min_prefix`.
    min_prefix: int = 0
    answer: AnswerReader = field(default_factory=AnswerReader)


class SlotPlacement:
    """Restores, decodes and saves slots for turns; writes `Conversation.snapshots`."""

    def __init__(
        self,
        *,
        config: SnapshotsConfig,
        api: StockApi,
        probe: ServerProbe,
        transfers: SnapshotTransfers,
        slots: SlotQueue,
        conversations: Conversations,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._api = api
        self._probe = probe
        self._transfers = transfers
        self._slots = slots
        self._conversations = conversations
        self._metrics = metrics

    async def prepare(
        self, scope: TurnScope, turn: SnapshotTurn, conversation: Conversation, lease: SlotLease
    ) -> SnapshotTurn:
        """Restore the part of the prompt that is cheaper to restore than to decode.

        Saves the boundary of the prompt when that is worth it. `scope.turn` is the stage that was
        reached, also when this raises.
        """
        scope.trace.stage = "look"
        slots = await self._list_slots(turn, lease)
        turn = replace(
            turn,
            slots_before=slots,
            branch=conversation.snapshots.branch or conversation.id,
        )
        scope.turn = turn
        contents = conversation.snapshots.contents
        conversation.snapshots.contents_changed(None)
        behaviour = self._probe.behaviour
        behaviour.note_slots(contents, slots)
        situation = Situation(
            prompt=turn.prompt,
            contents=contents,
            slots=slots,
            leased=lease.slot,
            n_slots=len(self._slots.pool),
            clears_idle_slots=self._probe.clears_idle_slots,
            behaviour=behaviour,
            min_gain_tokens=self._config.min_tokens // 2,
        )
        goal = turn.boundary if len(turn.boundary) else turn.prompt[:-1]
        match = self._transfers.find(turn.request.tenant, goal)
        placement = decide(situation, match, self._probe.costs)
        if placement.erased_slot is not None:
            await turn.calls.stock.erase(placement.erased_slot)
        elif contents is not None:
            behaviour.note_prompt(contents, turn.prompt)
        turn = replace(
            turn,
            decision=placement.source,
            predicted_ram=placement.predicted_ram,
            predicted_tokens=placement.predicted_tokens,
        )
        scope.turn = turn
        live = placement.live
        if placement.restore is not None:
            scope.trace.stage = "restore"
            restored = await self._restore(scope, turn, placement)
            if restored is not None:
                live = restored
                branch = placement.restore.snapshot.branch
                conversation.snapshots.branch_continued(branch)
                turn = replace(
                    turn,
                    decision="restored",
                    branch=branch,
                    restored=placement.restore,
                    predicted_ram=None,
                )
        turn = replace(
            turn,
            min_prefix=live.min_prefix if live is not None else 0,
            slot=slot_to_name(situation, turn.predicted_ram),
        )
        scope.turn = turn
        if self._may_save(turn, live):
            turn = await self._save_boundary(scope, turn, live, placement.reuse)
            scope.turn = turn
        return turn

    async def _list_slots(
        self, turn: SnapshotTurn, lease: SlotLease
    ) -> Sequence[SlotStatus] | None:
        """List the slots; notice when they are those of another server instance."""
        slots = await turn.calls.stock.list_slots()
        contents = [
            item.snapshots.contents for item in self._conversations if item.snapshots.contents
        ]
        if slots is not None and has_restarted(contents, slots):
            self.forget_contents()
            self._probe.forget()
            await self._probe.learn(turn.calls.stock, lease)
        return slots

    def forget_contents(self) -> None:
        """Note that llama-server has restarted: its slots and its RAM cache are empty."""
        for conversation in self._conversations:
            conversation.snapshots.contents_changed(None)
        self._probe.behaviour.ram_valid_since = time.monotonic()

    async def _restore(
        self, scope: TurnScope, turn: SnapshotTurn, placement: Placement
    ) -> SlotContents | None:
        """Return the contents of the slot after a restore; None when nothing was restored."""
        match, slot, api = placement.restore, placement.restore_slot, turn.calls.stock
        if match is None or slot is None or not await self._probe.is_same_server(api):
            return None
        # Set before the call: a turn that is cancelled during the call must end the restore.
        scope.turn = replace(turn, restored=match)
        try:
            restored = await self._transfers.restore(match, slot, api)
        except UpstreamError:
            scope.turn = (
                turn  # counted as failed: the reply does not show whether the snapshot was used
            )
            raise
        if not restored:
            scope.turn = turn
            return None
        min_prefix = match.shared if self._probe.behaviour.has_windows else 0
        return SlotContents(
            slot,
            match.snapshot.tokens,
            exact=True,
            at=time.monotonic(),
            min_prefix=min_prefix,
        )

    def _may_save(self, turn: SnapshotTurn, live: SlotContents | None) -> bool:
        """Whether to decode and save the boundary; counts the reason if not."""
        if len(turn.boundary) < self._config.min_tokens or _holds(live, turn.boundary):
            return False
        reason = self._transfers.reason_not_to_save(
            turn.request.tenant, turn.boundary, waited_for=True
        )
        if not reason and self._transfers.seconds_until_save() > 0:
            reason = "rate"
        pool = self._slots.pool
        if not reason and self._probe.clears_idle_slots and not (len(pool) == 1 or pool.alone()):
            reason = "cleared"  # another request may empty the slot before it is saved
        if reason and reason != "there":
            self._metrics.saves.labels(result=f"skipped_{reason}").inc()
        return not reason

    async def _save_boundary(
        self, scope: TurnScope, turn: SnapshotTurn, live: SlotContents | None, reuse: int
    ) -> SnapshotTurn:
        """Decode up to the boundary, and save the slot."""
        api = turn.calls.stock
        scope.trace.stage = "prefill"
        try:
            done = await api.prefill(turn.boundary, turn.slot)
        except UpstreamRejected as error:
            # Most likely the prompt is too long, which llama-server reports to the client.
            self._metrics.saves.labels(result="skipped_rejected").inc()
            _log.info("llama-server refused to decode up to the boundary: status %d", error.status)
            return turn
        turn = self._learn_from_prefill(turn, live, done, reuse)
        scope.turn = turn
        if len(self._slots.pool) > 1 and not self._probe.clears_idle_slots:
            # llama-server may have chosen another slot: follow it, unless a request has that one.
            lease = scope.leases[0]
            if done.slot != lease.slot and not self._slots.exchange(lease, done.slot):
                self._metrics.saves.labels(result="skipped_cleared").inc()
                return replace(turn, slot=lease.slot)
            turn = replace(turn, slot=done.slot, slots=(lease.slot,))
            scope.turn = turn
        scope.trace.stage = "save"
        if await self._probe.is_same_server(api):
            label = self.label(
                turn.request.tenant, turn.branch, kind_of(turn.chat), len(turn.boundary)
            )
            await self._transfers.save(done.slot, turn.boundary, label, api)
        return turn

    def _learn_from_prefill(
        self, turn: SnapshotTurn, live: SlotContents | None, done: PrefillResult, reuse: int
    ) -> SnapshotTurn:
        """Record what a prefill shows about the costs and the behaviour of the server."""
        self._probe.costs.prefilled(done.decoded, done.seconds)
        if turn.restored is not None:
            self._transfers.record_reuse(turn.restored, done.cached)
        elif live is not None and reuse and not live.exact:
            promised = min(reuse, len(turn.boundary))
            self._probe.behaviour.rollback.record(promised, done.cached)
        self._note_ram(turn, done.cached)
        return replace(turn, n_prefilled=done.decoded, restored=None, predicted_ram=None)

    def _note_ram(self, turn: SnapshotTurn, cached: int) -> None:
        """Record whether the RAM cache had the predicted contents."""
        if turn.predicted_ram is not None:
            self._probe.behaviour.note_ram(turn.predicted_ram, turn.predicted_tokens, cached)

    async def save_contents(self, conversation: Conversation) -> None:
        """Save the slot of a conversation if its contents are certain and worth a snapshot."""
        contents = conversation.snapshots.contents
        if contents is None or not contents.exact:
            return
        if self._transfers.reason_not_to_save(conversation.tenant, contents.tokens):
            return
        unchanged = contents.is_unchanged(await self._api.list_slots())
        if unchanged and await self._probe.is_same_server(self._api):
            branch = conversation.snapshots.branch or conversation.id
            label = self.label(conversation.tenant, branch, STEP, len(contents.tokens))
            await self._transfers.save(contents.slot, contents.tokens, label, self._api)

    def label(self, tenant: str, branch: str, kind: str, n_tokens: int) -> SnapshotLabel:
        """Return the label of a snapshot with `n_tokens` tokens."""
        seconds = self._probe.costs.prefill.seconds(n_tokens)
        return SnapshotLabel(tenant, self._probe.fingerprint, branch, kind, seconds)

    async def record_reply(self, turn: SnapshotTurn, outcome: Outcome) -> None:
        """Record the contents of the slot after a reply, while the slot is leased."""
        timings = outcome.timings or {}
        cached, decoded, generated = cost_of(timings, outcome.usage or {})
        self._probe.costs.prefilled(decoded, seconds_of(timings.get("prompt_ms")))
        slots = await turn.calls.stock.list_slots()
        if turn.restored is not None and decoded:
            self._transfers.record_reuse(turn.restored, cached)
        elif turn.restored is not None:
            self._transfers.end_without_result(turn.restored)
        if not decoded:
            return
        self._note_ram(turn, cached)
        conversation = turn.conversation
        if conversation is None or slots is None:
            return
        status = _slot_of_reply(turn, slots, cached + decoded + generated)
        # Even if the slot is unknown, llama-server may have its contents in RAM.
        left = SlotContents(
            status.id if status is not None else -1,
            turn.prompt,
            exact=False,
            at=time.monotonic(),
            status=status,
            min_prefix=turn.min_prefix,
        )
        conversation.snapshots.contents_changed(left)
        pool = self._slots.pool
        if len(pool) > 1 and status is not None and pool.slot_of(conversation.id) != status.id:
            pool.record_move(conversation.id, status.id)

    async def until_idle(self, turn: SnapshotTurn, is_stopping: Callable[[], bool]) -> None:
        """Wait until llama-server has noticed that the client of a turn has disconnected.

        If the slot of the turn is unknown, wait until all requests that may be the turn's have
        ended: those that began after the turn was prepared and run at the first poll.
        """
        earlier = {(status.id, status.task) for status in turn.slots_before or ()}
        first: list[set[tuple[int, int | None]]] = []

        async def busy() -> bool:
            slots = await turn.calls.stock.list_slots() or ()
            running = [status for status in slots if status.busy]
            if turn.slot is not None:
                return any(status.id == turn.slot for status in running)
            new = {(status.id, status.task) for status in running} - earlier
            first.append(new)
            return bool(new & first[0])

        await until_over(busy, is_stopping)


def with_status(contents: SlotContents, slots: Sequence[SlotStatus] | None) -> SlotContents:
    """Return the contents with the present status of their slot."""
    return replace(
        contents, status=next((item for item in slots or () if item.id == contents.slot), None)
    )


def _slot_of_reply(
    turn: SnapshotTurn, slots: Sequence[SlotStatus], n_tokens: int
) -> SlotStatus | None:
    """The slot of a reply, which has about `n_tokens` tokens after the reply."""
    if turn.slot is not None:
        return next((status for status in slots if status.id == turn.slot), None)
    if len(slots) == 1:
        return slots[0]
    before = {status.id: status.task for status in turn.slots_before or ()}
    new = [item for item in slots if before.get(item.id) != item.task and not item.busy]
    fitting = [item for item in new if abs(item.n_tokens - n_tokens) <= 2]
    return fitting[0] if len(fitting) == 1 else None


def _holds(contents: SlotContents | None, tokens: Tokens) -> bool:
    """Whether a slot has exactly these tokens, so that none of them must be decoded."""
    return contents is not None and contents.exact and np.array_equal(contents.tokens, tokens)
