"""What an admin works with at one llama-server."""

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


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AdminContext:
    """One llama-server, or one model behind a router, with what the proxy keeps of it."""

    # Makes the calls; bound to the model behind a router.
    client: LlamaClient
    # Knows what the server is now.
    monitor: ServerMonitor
    # Leases its slots.
    slots: SlotQueue
    # The conversations that are at it.
    conversations: Conversations
    # Owns the snapshots and their files.
    snapshots: SnapshotStrategy
    # Owns the records of sessions on disk.
    records: SessionPersistence
    # Owns the vectors of blocks.
    embedding: EmbeddingService
    # Publishes events to operators.
    feed: EventFeed
    # Name of the server in `pool.upstreams`; empty where there is only one.
    server_name: str = ""
