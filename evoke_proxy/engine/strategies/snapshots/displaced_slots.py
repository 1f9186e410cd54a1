"""Saves the slots of conversations before another request displaces them, and at a stop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.core.prompt.rendered import NO_TOKENS, Tokens, common_prefix
from evoke_proxy.core.request.look_ahead import STEP
from evoke_proxy.core.snapshots.slot_contents import SlotContents, SlotStatus, longest_shared
from evoke_proxy.core.snapshots.snapshots import Place
from evoke_proxy.engine.server.conversations import Conversation, Conversations
from evoke_proxy.engine.server.slot_queue import SlotLease, SlotQueue
from evoke_proxy.engine.strategies.snapshots.server_probe import ServerProbe
from evoke_proxy.engine.strategies.snapshots.slot_placement import SlotPlacement, with_status
from evoke_proxy.engine.strategies.snapshots.transfers import Loss, SnapshotTransfers

# A conversation with fewer requests may have no other: one-shot prompts are not saved for nothing.
_MIN_REQUESTS = 2


class DisplacedSlots:
    """Decides which slots a request displaces, and which of them are worth a save before that.

    Slots are saved with the latest answer, if the next prompt can continue it or do without. A save
    is worth it if decoding what no snapshot has takes longer, as often as the RAM cache of
    llama-server has lost such a slot. `snapshots.stall_share` does not apply: without the save the
    decoding would keep the slots longer.
    """

    def __init__(
        self,
        *,
        config: SnapshotsConfig,
        probe: ServerProbe,
        transfers: SnapshotTransfers,
        placement: SlotPlacement,
        slots: SlotQueue,
        conversations: Conversations,
    ) -> None:
        self._config = config
        self._probe = probe
        self._transfers = transfers
        self._placement = placement
        self._slots = slots
        self._conversations = conversations

    async def save(
        self,
        lease: SlotLease,
        api: StockApi,
        conversation: Conversation | None = None,
        prompt: Tokens = NO_TOKENS,
    ) -> None:
        """Save what a request displaces; its lease is not yet `vacated`.

        `conversation` and `prompt` are those of the request; without them it belongs to no
        conversation, or its tokens are not known. Raises UpstreamError.
        """
        if self._probe.problem:
            return
        displaced = list(self._displaced(lease, conversation))
        own = conversation.snapshots.contents if conversation is not None else None
        in_slots = [contents for _, contents in displaced] + ([own] if own is not None else [])
        n_chosen = longest_shared(in_slots, prompt)
        if not any(self._losses(*each, prompt, n_chosen) for each in displaced):
            return
        slots = await api.list_slots()
        for other, contents in list(self._displaced(lease, conversation, slots)):
            losses = self._losses(other, contents, prompt, n_chosen)
            if self._is_worth_saving(other, contents, losses):
                await self._save(other, contents, lease, api)

    def _losses(
        self, conversation: Conversation, contents: SlotContents, prompt: Tokens, n_chosen: int
    ) -> Sequence[Loss]:
        """What may be lost when a prompt displaces contents; each alone may be worth a save.

        llama-server keeps a copy in RAM, if it can, except where the prompt that displaces the
        contents has at least half of them (`get_available_slot` in
        tools/server/server-context.cpp): there all is lost but what the prompt has. Of several
        slots that is the one with most of the prompt: `n_chosen` tokens.
        """
        risk, n_answer = self._probe.behaviour.ram.loss, _n_answer(conversation, contents)
        losses = [Loss(risk, n_answer=n_answer)] if risk else []
        n_shared = common_prefix(contents.tokens, prompt)
        if 0 < len(contents.tokens) <= 2 * n_shared and n_shared == n_chosen:
            losses.append(Loss(n_kept=n_shared, n_answer=n_answer))
        return losses

    def _displaced(
        self,
        lease: SlotLease,
        conversation: Conversation | None,
        slots: Sequence[SlotStatus] | None = None,
    ) -> Iterator[tuple[Conversation, SlotContents]]:
        """Yield other conversations with what they have in slots that the request displaces.

        That is the leased slot, or all slots where llama-server empties idle ones. With `slots`
        only contents that are still in an idle slot.
        """
        for other in self._conversations:
            contents = other.snapshots.contents
            if contents is None or contents.slot < 0 or other is conversation:
                continue
            if contents.slot != lease.slot and not self._probe.clears_idle_slots:
                continue
            if _is_left(contents, slots):
                yield other, contents

    def _is_worth_saving(
        self, conversation: Conversation, contents: SlotContents, losses: Sequence[Loss]
    ) -> bool:
        tokens = contents.tokens
        if conversation.snapshots.n_sent < _MIN_REQUESTS or len(tokens) < self._config.min_tokens:
            return False
        if not self._is_of_use(conversation, contents):
            return False
        return any(
            not self._transfers.reason_not_to_save(
                conversation.tenant, tokens, waited_for=True, loss=loss
            )
            for loss in losses
        )

    async def save_contents(self, conversation: Conversation, api: StockApi) -> None:
        """Save the slot of a conversation if that is worth it; the caller has leased the slot.

        Raises UpstreamError.
        """
        contents = conversation.snapshots.contents
        if contents is None or contents.slot < 0 or not self._is_of_use(conversation, contents):
            return
        loss = Loss(n_answer=_n_answer(conversation, contents))
        if self._transfers.reason_not_to_save(conversation.tenant, contents.tokens, loss=loss):
            return
        slots = await api.list_slots()
        if contents.is_unchanged(slots) and await self._probe.is_same_server(api):
            await self._save_contents(conversation, with_status(contents, slots), api)

    def _is_of_use(self, conversation: Conversation, contents: SlotContents) -> bool:
        """Whether the next prompt may continue the contents, whatever it has for the answer."""
        may_continue = self._probe.behaviour.can_drop_answers or (
            conversation.snapshots.answers.is_trusted
        )
        return contents.exact or may_continue

    async def _save(
        self, other: Conversation, contents: SlotContents, lease: SlotLease, api: StockApi
    ) -> None:
        """Save a slot, unless a request has begun in it: llama-server would save it afterwards."""
        lock: contextlib.AbstractAsyncContextManager[object] | None = contextlib.nullcontext()
        if other.id != lease.victim:
            lock = self._slots.background(contents.slot, other.id, alone=False)
        if lock is None:
            return
        async with lock:
            if other.snapshots.contents is not contents or not await self._probe.is_same_server(
                api
            ):
                return
            slots = await api.list_slots()
            if _is_left(contents, slots):
                await self._save_contents(other, with_status(contents, slots), api)

    async def _save_contents(
        self, conversation: Conversation, contents: SlotContents, api: StockApi
    ) -> None:
        left = conversation.snapshots.contents
        branch, tokens = conversation.snapshots.branch or conversation.id, contents.tokens
        label = self._placement.label(conversation.tenant, branch, STEP, len(tokens))
        if contents.exact:
            await self._transfers.save(contents.slot, tokens, label, api)
            return
        label = replace(label, place=self._place(conversation.snapshots.answered, tokens))
        saved = await self._transfers.save_with_answer(contents.slot, tokens, label, api)
        if saved is not None and conversation.snapshots.contents is left:
            conversation.snapshots.answer_saved(saved, contents.status)

    def _place(self, earlier: SlotContents | None, prompt: Tokens) -> Place:
        """What a snapshot of a prompt with its answer replaces: the `earlier` one of that kind.

        The next prompt may have the answer in another form. Unless the memory can be cut back
        anywhere, also after a restart, the snapshots that end before the answer are then needed.
        """
        of = earlier.tokens if earlier is not None and earlier.has_history_of(prompt) else None
        return Place(of_prefixes=self._probe.behaviour.can_restore_partly, of=of)


def _n_answer(conversation: Conversation, contents: SlotContents) -> int:
    """How many tokens of the latest answer are in the slot, if the next prompt may have them."""
    if contents.exact or contents.status is None or not conversation.snapshots.answers.is_trusted:
        return 0
    return max(0, contents.status.n_tokens - len(contents.tokens))


def _is_left(contents: SlotContents, slots: Sequence[SlotStatus] | None) -> bool:
    """Whether contents are still in an idle slot; True when the server shows no slots."""
    if slots is None:
        return True
    is_idle = any(status.id == contents.slot and not status.busy for status in slots)
    return is_idle and contents.is_unchanged(slots)
