"""Saves and restores whole slots of a patched server, including their holes.

Models with recurrent states or attention windows need this: copies of blocks do not contain those.
States without holes are shared by the conversations of a tenant, see shared_states.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from evoke_proxy.adapters.llama.block_api import LATEST
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.core.model.counts import seconds_of
from evoke_proxy.core.prompt.rendered import SlotView, Tokens, common_prefix, has_media
from evoke_proxy.core.request.look_ahead import PREFIX, STEP, WHOLE
from evoke_proxy.core.session.accounting import TokenAccounting
from evoke_proxy.core.snapshots.costs import cost_of
from evoke_proxy.core.snapshots.snapshots import Match, Snapshot
from evoke_proxy.engine.server.conversations import Conversation, Conversations
from evoke_proxy.engine.server.strategy import StrategyProblem
from evoke_proxy.engine.storage.snapshot_repository import SnapshotLabel, SnapshotRepository
from evoke_proxy.engine.strategies.budgeted.saving_check import SavingCheck
from evoke_proxy.engine.strategies.budgeted.turn import RenderedTurn, SlotJob
from evoke_proxy.engine.strategies.snapshots.lookahead import decode_steps
from evoke_proxy.engine.strategies.snapshots.server_probe import ServerProbe
from evoke_proxy.engine.strategies.snapshots.transfers import SnapshotTransfers

# Kinds of snapshots that other conversations of the tenant may begin with.
SHARED_KINDS = (PREFIX, WHOLE)
# Fewer tokens are decoded sooner than a slot is saved and restored.
_MIN_GAIN = 256


class SlotSnapshots:
    """Saves and restores the slots of budgeted sessions, and decodes ahead in them.

    Attributes:
        repository: Stores the snapshots.
        saving: Whether llama-server saves slots there. While it does not, nothing is saved or
            restored.
    """

    def __init__(
        self,
        *,
        probe: ServerProbe,
        transfers: SnapshotTransfers,
        repository: SnapshotRepository,
        saving: SavingCheck,
        conversations: Conversations,
        metrics: Metrics,
    ) -> None:
        self._probe = probe
        self._transfers = transfers
        self.repository = repository
        self.saving = saving
        self._conversations = conversations
        self._metrics = metrics

    def forget_problems(self) -> None:
        """Another instance of llama-server answers: whether it saves slots is unknown."""
        self.saving.forget()
        self._transfers.failure = None

    @property
    def problem(self) -> StrategyProblem | None:
        """Why slots are not saved, or why the latest save has failed; None while they are."""
        return self.saving.problem or self._transfers.failure

    async def decode_ahead(self, job: SlotJob, tokens: Tokens) -> None:
        """Decode the prompt `tokens` in the slot of a job, which keeps its holes and its budget.

        Raises Preempted when a request arrives, and UpstreamErrors.
        """
        conversation = job.conversation
        if has_media(tokens):
            return  # images cannot be sent as tokens
        for end in decode_steps(len(conversation.session.tokens), len(tokens)):
            epoch = conversation.budgeted.epoch
            prefill = job.calls.stock.prefill(tokens[:end], job.slot, epoch)
            try:
                done = await job.lease.run(prefill)
            except BaseException:
                conversation.session.decoding_broke_off()
                raise
            accounting = TokenAccounting.parse(done.timings)
            if accounting is None or accounting.marker != "ok":
                conversation.budgeted.slot_unknown()
                return
            conversation.session.add_copies(accounting.new_copies)
            self._metrics.count_evictions("decode", len(accounting.auto_evicted))
            conversation.budgeted.decoded_ahead(tokens[:end])
            conversation.budgeted.tokens_counted(accounting.n_resident)

    async def save(self, job: SlotJob) -> None:
        """Save the slot of a job, which begins with the conversation's prompt.

        Does nothing directly after another save, for short prompts, for those with images, without
        room on the disk or a directory that can be used, and for a conversation that was forgotten.
        Raises EvokeErrors when a call fails.
        """
        if self._transfers.seconds_until_save() <= 0:
            await self._save(job)

    async def save_displaced(self, job: SlotJob) -> None:
        """Save the slot of a job now, because another conversation needs it; see `save`."""
        await self._save(job)

    async def _save(self, job: SlotJob) -> None:
        conversation, api = job.conversation, job.calls.stock
        tokens = _first_tokens_of_slot(conversation)
        if len(tokens) <= self._probe.behaviour.window_tokens or has_media(tokens):
            return
        if self.saving.problem is not None:
            return
        if not self._transfers.has_room(conversation.tenant, len(tokens)):
            return
        fingerprint = await api.fingerprint()
        # Without a tenant no copies are listed.
        view = SlotView.parse(await job.calls.blocks.slot(job.slot, "", LATEST))
        is_registered = self._conversations.get(conversation.id) is conversation
        if not is_registered and not conversation.has_moved:
            return  # it was forgotten in the meantime, and nothing would delete the snapshot
        is_whole = view.n_reusable == view.n_tokens and not conversation.budgeted.is_private
        label = SnapshotLabel(
            conversation.tenant,
            fingerprint,
            conversation.id,
            WHOLE if is_whole else STEP,
            self._probe.costs.prefill.seconds(len(tokens)),
        )
        await self._transfers.save_with_answer(job.slot, tokens, label, api)

    def is_worth_saving(self, conversation: Conversation, view: SlotView) -> bool:
        """Return whether the slot of a conversation is worth a save that a request waits for.

        `view` is the slot as the latest reply of the conversation left it.
        """
        if self.saving.problem is not None:
            return False
        tenant, tokens = conversation.tenant, _first_tokens_of_slot(conversation)
        own = [
            it
            for it in self.repository.snapshots
            if it.tenant == tenant and self._transfers.choice.may_restore(it)
        ]
        branch = [it for it in own if it.branch == conversation.id]
        if any(it.n_tokens >= view.n_tokens and _begins(it, tokens) for it in branch):
            return False  # it was saved after the latest reply
        usable = branch + [it for it in own if it.kind in SHARED_KINDS]
        existing = self._transfers.choice.to_restore(usable, tokens)
        gain = view.n_tokens - (existing.shared if existing is not None else 0)
        if gain < _MIN_GAIN:
            return False
        return self._probe.costs.worth_saving(gain, view.n_tokens, waited_for=True)

    def note_timings(self, timings: Mapping[str, Any] | None) -> None:
        """Learn from a reply how fast llama-server decodes prompts."""
        _, decoded, _ = cost_of(timings or {}, {})
        self._probe.costs.prefilled(decoded, seconds_of((timings or {}).get("prompt_ms")))

    async def find(self, turn: RenderedTurn, n_past: int) -> Match | None:
        """The snapshot of a conversation that shares the most leading tokens with its prompt.

        Returns None when none shares more than the `n_past` tokens that its slot has.
        """
        if self.saving.problem is not None:
            return None
        conversation, tokens, api = turn.conversation, turn.rendered.tokens, turn.calls.stock
        own = [
            item
            for item in self.repository.snapshots
            if (item.tenant, item.branch) == (conversation.tenant, conversation.id)
        ]
        choice = self._transfers.choice
        if not _reaches_beyond(choice.to_restore(own, tokens), n_past):
            return None
        fingerprint = await api.fingerprint()
        usable = (item for item in own if item.fingerprint == fingerprint)
        match = choice.to_restore(usable, tokens)
        return match if _reaches_beyond(match, n_past) else None

    async def restore(self, match: Match, turn: RenderedTurn) -> bool:
        """Fill the slot of a turn with a snapshot; False when llama-server does not accept it.

        The slot may be empty then. Raises UpstreamError.
        """
        if not await self._transfers.restore(match, turn.slot, turn.calls.stock):
            return False
        answer = await turn.calls.blocks.slot(turn.slot, turn.conversation.tenant, LATEST)
        self._transfers.record_reuse(match, int(answer.get("n_tokens") or 0))
        return True

    async def saves_ended(self) -> None:
        """Wait until the slots that were saved so far can be restored."""
        await self._transfers.seals_ended()

    async def shared_slot(self, turn: RenderedTurn) -> SharedSlot:
        """The slot of a turn, for states that the conversations of its tenant share.

        Raises UpstreamError.
        """
        fingerprint = await turn.calls.stock.fingerprint()
        return SharedSlot(self._probe, self._transfers, self.repository, turn, fingerprint)


class SharedSlot:
    """A slot that is given shared states, and saved as such."""

    def __init__(
        self,
        probe: ServerProbe,
        transfers: SnapshotTransfers,
        repository: SnapshotRepository,
        turn: RenderedTurn,
        fingerprint: str,
    ) -> None:
        """`turn` has the lease of the slot; `fingerprint` is that of llama-server."""
        self._probe = probe
        self._transfers = transfers
        self._repository = repository
        self._turn = turn
        self._fingerprint = fingerprint
        # Whether all rows of the slot were decoded with every earlier row in the cache.
        self._is_whole = False

    async def find(self, tokens: Tokens) -> Match | None:
        """The longest shared state with which these tokens begin, or None.

        At least one token is left, which llama-server has to decode.
        """
        await self._repository.refresh()
        owned = self._repository.of(self._turn.request.tenant, self._fingerprint)
        shared = (it for it in owned if it.kind in SHARED_KINDS)
        return self._transfers.choice.to_restore(shared, tokens[:-1])

    async def restore(self, match: Match) -> bool:
        """Verify a state and fill the slot with it; False when that is not possible."""
        turn = self._turn
        if not await self._transfers.restore(match, turn.slot, turn.calls.stock):
            return False
        view = await self._view()
        self._transfers.record_reuse(match, view.n_tokens)
        return True

    async def decode(self, tokens: Tokens) -> int:
        """Decode these tokens in the slot; returns how many of them were not in it.

        Without the epoch of the slot, llama-server reuses no row that was decoded while an earlier
        one was missing. Raises UpstreamError.
        """
        turn = self._turn
        done = await turn.calls.stock.prefill(tokens, turn.slot)
        self._probe.costs.prefilled(done.decoded, done.seconds)
        view = await self._view()
        self._is_whole = view.n_tokens == len(tokens) == view.n_reusable
        return done.decoded

    async def save(self, tokens: Tokens, is_expected: bool) -> bool:
        """Save the slot, which has exactly `tokens`; False when it is not saved.

        `is_expected`: other conversations have these tokens. Otherwise saving has to keep to its
        share of the time. Raises UpstreamError.
        """
        conversation, transfers = self._turn.conversation, self._transfers
        if not self._is_whole or len(tokens) <= self._probe.behaviour.window_tokens:
            return False
        if not is_expected and transfers.seconds_until_save() > 0:
            return False
        existing = await self.find(tokens)
        gain = len(tokens) - (existing.shared if existing is not None else 0)
        n_bytes = len(tokens) * self._probe.costs.bytes_per_token
        is_worth_it = self._probe.costs.worth_saving(gain, len(tokens), waited_for=True)
        if not is_worth_it or not self._repository.has_room(conversation.tenant, n_bytes):
            return False
        label = SnapshotLabel(
            conversation.tenant,
            self._fingerprint,
            conversation.id,
            PREFIX,
            self._probe.costs.prefill.seconds(len(tokens)),
        )
        turn = self._turn
        return await transfers.save(turn.slot, tokens, label, turn.calls.stock)

    async def is_complete(self, tokens: Tokens) -> bool:
        """Wait until a state that was saved can be restored; False when it cannot."""
        await self._transfers.seals_ended()
        tenant = self._turn.request.tenant
        states = self._repository.of(tenant, self._fingerprint)
        return any(np.array_equal(it.tokens, tokens) for it in states if it.kind in SHARED_KINDS)

    async def progress(self) -> tuple[int, int]:
        """How many tokens the slot has, and how many the prompt of its turn has."""
        n_prompt = len(self._turn.rendered.tokens)
        return min((await self._view()).n_tokens, n_prompt), n_prompt

    async def _view(self) -> SlotView:
        # Without a tenant no copies are listed.
        return SlotView.parse(await self._turn.calls.blocks.slot(self._turn.slot, "", LATEST))


def _first_tokens_of_slot(conversation: Conversation) -> Tokens:
    """The tokens that the slot of a conversation begins with; those of its answer may follow."""
    ahead = conversation.budgeted.ahead
    return ahead if ahead is not None else conversation.session.tokens


def _begins(snapshot: Snapshot, tokens: Tokens) -> bool:
    return common_prefix(snapshot.tokens, tokens) == len(tokens)


def _reaches_beyond(match: Match | None, n_past: int) -> bool:
    return match is not None and match.shared > n_past
