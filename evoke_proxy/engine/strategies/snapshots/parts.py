"""What the parts of a keeper work with."""

from __future__ import annotations

from dataclasses import dataclass

from evoke_proxy.adapters.llama.stock_api import StockApi
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.engine.server.conversations import Conversations
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.strategies.snapshots.server_probe import ServerProbe
from evoke_proxy.engine.strategies.snapshots.transfers import SnapshotTransfers


@dataclass(frozen=True, slots=True)
class Parts:
    """One keeper's settings, its calls and what they told, its snapshots, the slots, who
    is known, its books."""

    config: SnapshotsConfig
    calls: StockApi
    facts: ServerProbe
    states: SnapshotTransfers
    slots: SlotQueue
    conversations: Conversations
    metrics: Metrics

    def slot_of_work(self, slot: int) -> int | None:
        """What a background lease for work in a slot has to be of; None: all slots.

        All of them where llama-server chooses the slot of a request, or empties idle ones.
        """
        n_slots = len(self.slots.pool)
        one = n_slots > 1 and not self.facts.clears and 0 <= slot < n_slots
        return slot if one else None
