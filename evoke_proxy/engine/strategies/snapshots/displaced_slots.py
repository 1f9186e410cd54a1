"""Saves the slots of conversations before a request of another one displaces their rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.request.look_ahead import STEP
from evoke_proxy.core.snapshots.slot_contents import SlotContents, SlotStatus
from evoke_proxy.core.snapshots.snapshots import Place
from evoke_proxy.engine.server.conversations import Conversation, Conversations
from evoke_proxy.engine.server.slot_queue import SlotLease, SlotQueue
from evoke_proxy.engine.strategies.snapshots.server_probe import ServerProbe
from evoke_proxy.engine.strategies.snapshots.slot_placement import SlotPlacement
from evoke_proxy.engine.strategies.snapshots.transfers import SnapshotTransfers

# A conversation with fewer requests may have no other: one-shot prompts are not saved for nothing.
_MIN_REQUESTS = 2


class DisplacedSlots:
    """Decides which slots a request displaces, and which of them are worth a save before that.

    A save is worth it if decoding what no snapshot has takes longer, as often as the RAM cache of
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

    async def save(self, conversation: Conversation, lease: SlotLease, api: StockApi) -> None:
        """Save what a request of a conversation displaces; its lease is not yet `vacated`.

        Raises UpstreamError.
        """
        if self._probe.problem or not self._probe.behaviour.ram.loss:
            return
        if not any(True for _ in self._displaced(conversation, lease)):
            return
        slots = await api.list_slots()
        for other, contents in list(self._displaced(conversation, lease, slots)):
            if self._is_worth_saving(other, contents):
                await self._save(other, contents, lease, api)

    def _displaced(
        self,
        conversation: Conversation,
        lease: SlotLease,
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

    def _is_worth_saving(self, conversation: Conversation, contents: SlotContents) -> bool:
        tokens, behaviour = contents.tokens, self._probe.behaviour
        if conversation.snapshots.n_sent < _MIN_REQUESTS or len(tokens) < self._config.min_tokens:
            return False
        may_continue = behaviour.can_drop_answers or conversation.snapshots.answers.is_trusted
        if not (contents.exact or may_continue):
            return False  # the next prompt has the latest answer in another form
        return not self._transfers.reason_not_to_save(
            conversation.tenant, tokens, waited_for=True, risk=behaviour.ram.loss
        )

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
            if not _is_left(contents, await api.list_slots()):
                return
            branch, tokens = other.snapshots.branch or other.id, contents.tokens
            label = self._placement.label(other.tenant, branch, STEP, len(tokens))
            if contents.exact:
                await self._transfers.save(contents.slot, tokens, label, api)
            else:
                label = replace(label, place=self._place(other.snapshots.answered, tokens))
                saved = await self._transfers.save_with_answer(contents.slot, tokens, label, api)
                if saved is not None and other.snapshots.contents is contents:
                    other.snapshots.answer_saved(saved)

    def _place(self, earlier: SlotContents | None, prompt: Tokens) -> Place:
        """What a snapshot of a prompt with its answer replaces: the `earlier` one of that kind.

        The next prompt may have the answer in another form. Unless the memory can be cut back
        anywhere, also after a restart, the snapshots that end before the answer are then needed.
        """
        of = earlier.tokens if earlier is not None and earlier.has_history_of(prompt) else None
        return Place(of_prefixes=self._probe.behaviour.can_restore_partly, of=of)


def _is_left(contents: SlotContents, slots: Sequence[SlotStatus] | None) -> bool:
    """Whether contents are still in an idle slot; True when the server shows no slots."""
    if slots is None:
        return True
    is_idle = any(status.id == contents.slot and not status.busy for status in slots)
    return is_idle and contents.is_unchanged(slots)
