"""Prepares the slot of a request, and records what its reply leaves there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np

from evoke_proxy.adapters.llama.stock_api import PrefillResult, StockApi
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.core.model.counts import seconds_of
from evoke_proxy.core.prompt.rendered import Tokens, common_prefix
from evoke_proxy.core.reply.answer import AnswerReader
from evoke_proxy.core.request.chat import ChatRequest
from evoke_proxy.core.request.look_ahead import PREFIX, kind_of
from evoke_proxy.core.snapshots.costs import cost_of
from evoke_proxy.core.snapshots.placement import Placement, Situation, decide, slot_to_name
from evoke_proxy.core.snapshots.ram_cache import Reuse
from evoke_proxy.core.snapshots.slot_contents import (
    SlotContents,
    SlotStatus,
    has_restarted,
    longest_shared,
)
from evoke_proxy.core.snapshots.snapshots import Match
from evoke_proxy.engine.gateway import Outcome
from evoke_proxy.engine.server.conversations import Conversation, Conversations
from evoke_proxy.engine.server.slot_queue import SlotLease, SlotQueue, until_over
from evoke_proxy.engine.server.turn import PreparedTurn, TurnScope
from evoke_proxy.engine.storage.snapshot_repository import SnapshotLabel
from evoke_proxy.engine.strategies.beginnings import Beginning
from evoke_proxy.engine.strategies.snapshots.server_probe import ServerProbe
from evoke_proxy.engine.strategies.snapshots.shared_beginnings import (
    RestoreLock,
    SharedBeginnings,
)
from evoke_proxy.engine.strategies.snapshots.shared_cells import SharedCells
from evoke_proxy.engine.strategies.snapshots.transfers import SnapshotTransfers
from evoke_proxy.errors import UpstreamError, UpstreamRejected

_log = logging.getLogger(__name__)
# Seconds that a request whose slot was restored may take to start in llama-server.
_MAX_START_S = 2.0
# Tokens behind a restored state that are decoded to see whether it is reused.
_PROOF_TOKENS = 512


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
    # Of contents that the RAM cache may have: their depth, and the tokens that the prompt shares.
    depth: int | None = None
    displaced_tokens: int = 0
    # Tokens of the prompt that the contents of another conversation have.
    shared_tokens: int = 0
    # The slots before the turn; None where the server does not list them.
    slots_before: Sequence[SlotStatus] | None = None
    # See `SlotContents.min_prefix`.
    min_prefix: int = 0
    answer: AnswerReader = field(default_factory=AnswerReader)

    @property
    def goal(self) -> Tokens:
        """The part of the prompt that need not be decoded with the request itself."""
        return self.boundary if len(self.boundary) else self.prompt[:-1]


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A part of a prompt that is decoded, and then saved, before the request is forwarded."""

    # The prompt up to the end of the step.
    tokens: Tokens
    # The kind of snapshot.
    kind: str
    # What the slot has before it, and how many tokens of the prompt that is expected to be.
    live: SlotContents | None
    reuse: int
    # It is saved even if that exceeds the share of the time that saves may take.
    is_urgent: bool = False
    # Requests with a slot that wait until it is saved.
    n_waiting: int = 0


class SlotPlacement:
    """Restores, decodes and saves slots for turns; writes `Conversation.snapshots`."""

    def __init__(
        self,
        *,
        config: SnapshotsConfig,
        probe: ServerProbe,
        transfers: SnapshotTransfers,
        slots: SlotQueue,
        conversations: Conversations,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._probe = probe
        self._transfers = transfers
        self._slots = slots
        self._conversations = conversations
        self._metrics = metrics
        self._beginnings = SharedBeginnings(conversations, transfers)
        self._restores = asyncio.Lock()

    async def prepare(
        self, scope: TurnScope, turn: SnapshotTurn, conversation: Conversation, lease: SlotLease
    ) -> SnapshotTurn:
        """Restore the part of the prompt that is cheaper to restore than to decode.

        Saves the boundary of the prompt when that is worth it, and before it the beginning that
        other conversations may have. `scope.turn` is the stage that was reached, also when this
        raises.
        """
        beginning = Beginning(turn.request.tenant, turn.prompt)
        lock = RestoreLock(self._restores)
        try:
            await self._begin(scope, turn, beginning, lock)
            turn, step = await self._reusing(scope, turn, conversation, lease)
            if turn.restored is None:
                lock.close()  # others need not wait for what this request decodes
            elif lock.is_locked:
                turn, step = await self._prove(scope, turn, step)
                if not self._may_clear:
                    lock.close()
            turn, step = await self._save_beginnings(scope, turn, step, beginning)
            if self._may_save(turn, step):
                turn, _ = await self._save(scope, turn, step)
            if lock.is_locked:
                await self._release(lock, turn.calls.stock)
        except BaseException:
            # The request may be forwarded nevertheless, and its reply may take minutes.
            lock.close()
            self._beginnings.give_up(beginning.states)
            raise
        return turn

    async def _reusing(
        self, scope: TurnScope, turn: SnapshotTurn, conversation: Conversation, lease: SlotLease
    ) -> tuple[SnapshotTurn, _Step]:
        """Choose between the slot, the RAM cache and a snapshot, which is restored.

        Returns the turn, and the step from there to the boundary.
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
        conversation.snapshots.prompted(turn.prompt)
        conversation.snapshots.contents_changed(None)
        behaviour = self._probe.behaviour
        behaviour.note_slots(contents, slots)
        situation = Situation(
            prompt=turn.prompt,
            contents=contents,
            depth=self._depth(contents),
            slots=slots,
            leased=lease.slot,
            n_slots=len(self._slots.pool),
            clears_idle_slots=self._probe.clears_idle_slots,
            behaviour=behaviour,
            min_gain_tokens=self._config.min_tokens // 2,
        )
        match = self._transfers.find(
            turn.request.tenant, turn.goal, conversation.snapshots.answered
        )
        placement = decide(situation, match, self._probe.costs)
        if placement.erased_slot is not None:
            await turn.calls.stock.erase(placement.erased_slot)
        elif contents is not None:
            behaviour.note_prompt(turn.request.tenant, contents, turn.prompt)
        turn = replace(
            turn,
            decision=placement.source,
        )
        if placement.displaced is not None:
            n_shared = common_prefix(placement.displaced.tokens, turn.prompt)
            n_of_others = longest_shared(self._all_contents(), turn.prompt)
            turn = replace(
                turn,
                depth=situation.depth,
                displaced_tokens=n_shared,
                shared_tokens=n_of_others,
            )
        scope.turn = turn
        live = placement.live
        if placement.restore is not None:
            scope.trace.stage = "restore"
            restored = await self._restore(scope, turn, placement)
            if restored is not None:
                if turn.depth is not None and not behaviour.ram.has(turn.depth):
                    behaviour.ram.note_unused()
                live = restored
                branch = turn.branch
                if placement.restore.snapshot.kind != PREFIX:
                    branch = placement.restore.snapshot.branch
                    conversation.snapshots.branch_continued(branch)
                elif not conversation.is_committed:
                    self._metrics.shared.inc(placement.restore.shared)
                turn = replace(
                    turn,
                    decision="restored",
                    branch=branch,
                    restored=placement.restore,
                    depth=None,
                )
        if turn.depth is not None and behaviour.ram.exists:
            await self._let_ram_load(turn, situation)
        turn = replace(
            turn,
            min_prefix=live.min_prefix if live is not None else 0,
            slot=slot_to_name(situation, turn.depth is not None),
        )
        scope.turn = turn
        return turn, _Step(turn.boundary, kind_of(turn.chat), live, placement.reuse)

    async def _let_ram_load(self, turn: SnapshotTurn, situation: Situation) -> None:
        """Move what keeps llama-server from loading the contents of a conversation to its RAM.

        It loads nothing into a slot of which the prompt has at least half (`get_available_slot` in
        tools/server/server-context.cpp), even if the RAM cache has more of the prompt. A token with
        which no prompt begins displaces such a slot, and llama-server keeps a copy.
        """
        for contents in list(self._all_contents()):
            if contents.slot != situation.leased and not situation.server_chooses:
                continue
            n_shared = common_prefix(contents.tokens, turn.prompt)
            is_obstacle = len(contents.tokens) <= 2 * n_shared < 2 * turn.displaced_tokens
            if is_obstacle and _is_idle(contents, situation.slots):
                others = turn.prompt[turn.prompt != turn.prompt[0]]
                await turn.calls.stock.prefill(others[:1], contents.slot)

    def _depth(self, contents: SlotContents | None) -> int:
        """Return the depth that contents have in the RAM cache if they have left their slot."""
        if contents is None:
            return 0
        later = (each for each in self._all_contents() if each.at > contents.at)
        return len(contents.tokens) + sum(len(each.tokens) for each in later)

    def _all_contents(self) -> Iterator[SlotContents]:
        """Yield what conversations without a running request have left in slots."""
        for conversation in self._conversations:
            if conversation.snapshots.contents is not None:
                yield conversation.snapshots.contents

    async def _prove(
        self, scope: TurnScope, turn: SnapshotTurn, step: _Step
    ) -> tuple[SnapshotTurn, _Step]:
        """Decode the first tokens behind a restored state: whether it is reused is known then."""
        end = (turn.restored.shared if turn.restored is not None else 0) + _PROOF_TOKENS
        turn, _ = await self._decode(scope, turn, replace(step, tokens=turn.goal[:end]))
        return turn, replace(step, live=None, reuse=0)

    async def _begin(
        self, scope: TurnScope, turn: SnapshotTurn, beginning: Beginning, lock: RestoreLock
    ) -> None:
        """Wait for the states that others save for the first request of a conversation.

        Does nothing for other requests. Only one first request at a time restores a state that was
        never restored before, and of a server that empties idle slots, any: `lock` then keeps
        others from that.
        """
        conversation = turn.conversation
        if conversation is None or conversation.is_committed or self._probe.problem:
            return
        if len(turn.prompt) <= self._config.min_tokens:
            return
        scope.trace.stage = "share"
        scope.keep_open(self._beginnings.running(beginning))
        await self._beginnings.begin(beginning, conversation, turn.body, turn.calls.stock)
        scope.keep_open(closing(lock))
        await lock.take()
        match = self._transfers.find(turn.request.tenant, turn.prompt[:-1])
        is_proven = match is not None and self._transfers.choice.was_useful(match.snapshot)
        if match is None or (is_proven and not self._may_clear):
            lock.close()

    @property
    def _may_clear(self) -> bool:
        """Whether a request that starts empties the slots that were prepared for others."""
        return self._probe.clears_idle_slots and len(self._slots.pool) > 1

    async def _release(self, lock: RestoreLock, api: StockApi) -> None:
        """Let other first requests restore slots, once that cannot affect this one."""
        if not self._may_clear:
            lock.close()
            return
        before = _tasks_of(await api.list_slots())

        async def has_not_started() -> bool:
            return _tasks_of(await api.list_slots()) == before

        async def wait() -> None:
            loop = asyncio.get_running_loop()
            until = loop.time() + _MAX_START_S
            with closing(lock):
                await until_over(has_not_started, lambda: loop.time() > until)

        self._transfers.run(wait(), "waiting for the start of a request")

    async def _list_slots(
        self, turn: SnapshotTurn, lease: SlotLease
    ) -> Sequence[SlotStatus] | None:
        """List the slots; notice when they are those of another server instance."""
        # What turns leave while llama-server answers may be newer than the answer.
        before = [(item, item.snapshots.contents) for item in self._conversations]
        slots = await turn.calls.stock.list_slots()
        contents = [left for item, left in before if left and item.snapshots.contents is left]
        if slots is not None and has_restarted(contents, slots):
            self.forget_contents()
            self._probe.forget()
            await self._probe.learn(turn.calls.stock, lease)
        return slots

    def forget_contents(self) -> None:
        """Note that llama-server has restarted: its slots and its RAM cache are empty."""
        for conversation in self._conversations:
            conversation.snapshots.contents_changed(None)
        self._probe.behaviour.ram.empty_before = time.monotonic()

    async def _restore(
        self, scope: TurnScope, turn: SnapshotTurn, placement: Placement
    ) -> SlotContents | None:
        """Return the contents of the slot after a restore; None when nothing was restored."""
        match, slot, api = placement.restore, placement.restore_slot, turn.calls.stock
        if match is None or slot is None or not await self._probe.is_same_server(api):
            return None
        displaced = [
            status
            for status in turn.slots_before or ()
            if status.n_tokens and (status.id == slot or (self._may_clear and not status.busy))
        ]
        if self._probe.behaviour.ram.exists and displaced:
            # llama-server keeps in RAM what another prompt displaces, but not what a restore does.
            # For the prompt it also empties the idle slots, whose cells the restore may need.
            await api.prefill(turn.prompt[:1], slot)
        # Set before the call: a turn that is cancelled during the call must end the restore.
        scope.turn = replace(turn, restored=match)
        try:
            cells = SharedCells(self._slots, self._conversations, api, slot)
            restored = await self._transfers.restore(match, slot, api, cells)
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

    def _may_save(self, turn: SnapshotTurn, step: _Step) -> bool:
        """Whether to decode and save the end of a step; counts the reason if not."""
        if len(step.tokens) < self._config.min_tokens or _holds(step.live, step.tokens):
            return False
        reason = self._transfers.reason_not_to_save(
            turn.request.tenant, step.tokens, waited_for=True
        )
        if not reason and not step.is_urgent and self._transfers.seconds_until_save() > 0:
            reason = "rate"
        pool = self._slots.pool
        is_alone = len(pool) == 1 or pool.alone() or 0 < step.n_waiting == pool.n_busy - 1
        if not reason and self._probe.clears_idle_slots and not is_alone:
            reason = "cleared"  # another request may empty the slot before it is saved
        if reason and reason != "there":
            self._metrics.saves.labels(result=f"skipped_{reason}").inc()
        return not reason

    async def _save_beginnings(
        self, scope: TurnScope, turn: SnapshotTurn, step: _Step, beginning: Beginning
    ) -> tuple[SnapshotTurn, _Step]:
        """Decode and save what other conversations may begin with.

        Returns the turn, and the step to the boundary behind it.
        """
        for state in beginning.states:
            part = replace(
                step,
                tokens=state.tokens,
                kind=PREFIX,
                is_urgent=self._beginnings.is_expected(beginning, state),
                n_waiting=self._beginnings.n_that_wait(beginning, state),
            )
            if not self._may_save(turn, part):
                self._beginnings.give_up([state])
                continue
            turn, state.is_saved = await self._save(scope, turn, part)
            step = replace(step, live=None, reuse=0)
            if not state.is_saved:
                self._beginnings.give_up(beginning.states)
                break
            self._transfers.run(self._beginnings.finish(state), "sharing a state")
            # What is left up to the boundary is saved as well, if that is worth it.
            step = replace(step, is_urgent=True)
        return turn, step

    async def _save(
        self, scope: TurnScope, turn: SnapshotTurn, step: _Step
    ) -> tuple[SnapshotTurn, bool]:
        """Decode up to the end of a step, and save the slot; returns whether that succeeded."""
        turn, slot = await self._decode(scope, turn, step)
        scope.trace.stage = "save"
        if slot is None or not await self._probe.is_same_server(turn.calls.stock):
            return turn, False
        label = self.label(turn.request.tenant, turn.branch, step.kind, len(step.tokens))
        return turn, await self._transfers.save(slot, step.tokens, label, turn.calls.stock)

    async def _decode(
        self, scope: TurnScope, turn: SnapshotTurn, step: _Step
    ) -> tuple[SnapshotTurn, int | None]:
        """Decode up to the end of a step; returns the slot that has it, if that is leased."""
        api = turn.calls.stock
        scope.trace.stage = "prefill"
        try:
            await self._transfers.until_verified(api)
            done = await api.prefill(step.tokens, turn.slot)
        except UpstreamRejected as error:
            # Most likely the prompt is too long, which llama-server reports to the client.
            self._metrics.saves.labels(result="skipped_rejected").inc()
            _log.info("llama-server refused to decode up to the boundary: status %d", error.status)
            return turn, None
        turn = self._learn_from_prefill(turn, step, done)
        scope.turn = turn
        if len(self._slots.pool) > 1 and not self._probe.clears_idle_slots:
            # llama-server may have chosen another slot: follow it, unless a request has that one.
            lease = scope.leases[0]
            if done.slot != lease.slot and not self._slots.exchange(lease, done.slot):
                self._metrics.saves.labels(result="skipped_cleared").inc()
                scope.turn = replace(turn, slot=lease.slot)
                return scope.turn, None
            turn = replace(turn, slot=done.slot, slots=(lease.slot,))
            scope.turn = turn
        return turn, done.slot

    def _learn_from_prefill(
        self, turn: SnapshotTurn, step: _Step, done: PrefillResult
    ) -> SnapshotTurn:
        """Record what a prefill shows about the costs and the behaviour of the server."""
        self._probe.costs.prefilled(done.decoded, done.seconds)
        if turn.restored is not None:
            self._transfers.record_reuse(turn.restored, done.cached)
        elif step.live is not None and step.reuse and not step.live.exact:
            promised = min(step.reuse, len(step.tokens))
            self._probe.behaviour.rollback.record(promised, done.cached)
        self._note_ram(turn, done.cached)
        n_prefilled = turn.n_prefilled + done.decoded
        return replace(turn, n_prefilled=n_prefilled, restored=None, depth=None)

    def _note_ram(self, turn: SnapshotTurn, cached: int) -> None:
        """Record whether the RAM cache had what others have displaced."""
        if turn.depth is not None:
            reuse = Reuse(cached, turn.displaced_tokens, turn.shared_tokens)
            self._probe.behaviour.ram.note_reuse(turn.depth, reuse)

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
        earlier = _tasks_of(turn.slots_before)
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


def _is_idle(contents: SlotContents, slots: Sequence[SlotStatus] | None) -> bool:
    """Whether contents are still in their slot, and no request runs in it."""
    idle = [status for status in slots or () if not status.busy]
    return contents.is_unchanged(idle)


def _tasks_of(slots: Sequence[SlotStatus] | None) -> set[tuple[int, int | None]]:
    """The slots, each with its latest task."""
    return {(status.id, status.task) for status in slots or ()}


def _holds(contents: SlotContents | None, tokens: Tokens) -> bool:
    """Whether a slot has exactly these tokens, so that none of them must be decoded."""
    return contents is not None and contents.exact and np.array_equal(contents.tokens, tokens)
