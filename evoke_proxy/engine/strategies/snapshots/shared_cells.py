"""Empties idle slots whose cells a restore needs, where slots share their cells (unified KV)."""

from __future__ import annotations

import logging

from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.core.snapshots.slot_contents import SlotContents, SlotStatus
from evoke_proxy.engine.server.conversations import Conversations
from evoke_proxy.engine.server.slot_queue import SlotQueue

_log = logging.getLogger(__name__)


class SharedCells:
    """The cells for one restore.

    llama-server refuses a restore for which too few cells are free, and does not say that this is
    the reason. To decode the same tokens, it would empty idle slots itself.

    Attributes:
        are_taken: Whether slots that cannot be emptied may have cells that the restore needs.
    """

    def __init__(
        self, slots: SlotQueue, conversations: Conversations, api: StockApi, slot: int
    ) -> None:
        """`slot` is the slot that is to be filled."""
        self._slots = slots
        self._conversations = conversations
        self._api = api
        self._slot = slot
        self.are_taken = False

    async def free(self, n_tokens: int) -> bool:
        """Empty idle slots until `n_tokens` fit, the least recently used first.

        Returns whether more cells are free now. Raises UpstreamError.
        """
        slots, n_cells = await self._api.list_slots() or (), self._api.n_ctx or 0
        if sum(status.n_tokens for status in slots) > n_cells:
            return False  # the slots do not share cells: the restore was refused for another reason
        others = [status for status in slots if status.id != self._slot and status.n_tokens]
        n_missing = n_tokens + sum(status.n_tokens for status in others) - n_cells
        has_freed = False
        for status in sorted(others, key=self._used_at):
            if n_missing > 0 and not status.busy and await self._empty(status.id):
                n_missing, has_freed = n_missing - status.n_tokens, True
        self.are_taken = n_missing > 0
        return has_freed

    def _used_at(self, status: SlotStatus) -> float:
        """When a conversation has left what is in a slot; 0 where that is unknown."""
        return max((contents.at for contents in self._contents_of(status.id)), default=0.0)

    def _contents_of(self, slot: int) -> list[SlotContents]:
        all_contents = (conversation.snapshots.contents for conversation in self._conversations)
        return [contents for contents in all_contents if contents and contents.slot == slot]

    async def _empty(self, slot: int) -> bool:
        """Empty a slot; False when a request has it."""
        lease = self._slots.background(slot, alone=False)
        if lease is None:
            return False
        async with lease:
            await self._api.erase(slot)
            _log.info("slot %d is emptied: its cells are needed for another conversation", slot)
            for conversation in self._conversations:
                contents = conversation.snapshots.contents
                if contents is not None and contents.slot == slot:
                    conversation.snapshots.contents_changed(None)
        return True
