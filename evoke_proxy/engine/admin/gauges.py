"""Gauges of the whole proxy, over all models that it serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.engine.server.conversations import Conversations
from evoke_proxy.engine.server.slot_queue import SlotQueue

# Of each model that there is now.
Served = Callable[[], Sequence[tuple[SlotQueue, Conversations]]]


def show(metrics: Metrics, served: Served) -> None:
    """Tell, whenever they are asked for, what waits, what is known and what is resident."""

    def resident() -> int:
        return sum(known.n_resident for _, there in served() for known in list(there))

    metrics.queued.set_function(lambda: sum(slots.pool.queued for slots, _ in served()))
    metrics.sessions.set_function(lambda: sum(len(there) for _, there in served()))
    metrics.resident.set_function(resident)
