"""What an operator's orders reach."""

from __future__ import annotations

from dataclasses import dataclass

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.engine.embedding.service import EmbeddingService
from evoke_proxy.engine.feed import EventFeed
from evoke_proxy.engine.server.conversations import Conversations
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.strategies.budgeted.session_records import SessionPersistence
from evoke_proxy.engine.strategies.snapshots.strategy import SnapshotStrategy


@dataclass(frozen=True, slots=True)
class Reach:
    """Of one model: its server and what is known of it, its slots, who is known, what is kept of
    them, in snapshots, records and vectors; and who is told. `routed`: the model itself, behind a
    router."""

    upstream: LlamaClient
    watch: ServerMonitor
    slots: SlotQueue
    conversations: Conversations
    keeper: SnapshotStrategy
    records: SessionPersistence
    embedding: EmbeddingService
    feed: EventFeed
    routed: LlamaClient | None
