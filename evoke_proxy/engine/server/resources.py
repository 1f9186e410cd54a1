"""What the strategies of one llama-server work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evoke_proxy.adapters.llama.block_api import BlockApi
from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.engine.feed import EventFeed
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.engine.server.conversations import Conversations
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.engine.server.slot_queue import SlotQueue


@dataclass(frozen=True, slots=True)
class ServerResources:
    """One llama-server, and what the proxy keeps of it; shared by its strategies."""

    # Opens requests, and makes the calls that any llama-server answers.
    client: LlamaClient
    # Makes the calls that only a patched llama-server answers.
    blocks: BlockApi
    # Knows what the server is now.
    monitor: ServerMonitor
    # Leases its slots.
    slots: SlotQueue
    # The conversations that are at it.
    conversations: Conversations
    # Runs work that no request waits for.
    background: BackgroundTasks
    metrics: Metrics
    # Publishes events to operators.
    feed: EventFeed
    # Whether the proxy stops, so that nothing is to be waited for.
    is_stopping: Callable[[], bool]
