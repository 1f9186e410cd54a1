"""Builds what all servers of a proxy share: metrics, events, embedder, snapshots, parser."""

from __future__ import annotations

from typing import Any

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import Config
from evoke_proxy.engine.embedding.service import EmbeddingService
from evoke_proxy.engine.feed import EventFeed
from evoke_proxy.engine.parsing.parser import RequestParser
from evoke_proxy.engine.server.body_memory import BodyMemory
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository


class Shared:
    """The objects that all servers of a proxy share, as an async context manager.

    Attributes:
        homes: URLs of the servers of a pool in their order; empty where there is only one server.
        draining: whether the proxy is stopping.
        repository: stores snapshots and session records; None without a directory for them.
    """

    def __init__(self, config: Config, homes: tuple[str, ...] = ()) -> None:
        self.homes = homes
        self.draining = False
        self.metrics = Metrics()
        self.feed = EventFeed()
        self.embedding = EmbeddingService(config.embedder, self.metrics)
        keeps = bool(config.snapshots.directory)
        self.repository = SnapshotRepository(config.snapshots, self.metrics) if keeps else None
        self.body_memory = BodyMemory(config.limits.bodies_mib)
        self.parser = RequestParser(config, self.metrics)

    async def __aenter__(self) -> Shared:
        if self.repository is not None:
            self.repository.open()
        await self.embedding.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.embedding.__aexit__()
        if self.repository is not None:
            self.repository.close()

    def adjust(self, config: Config) -> None:
        """Apply another configuration; only keys that can change at run time may differ."""
        self.body_memory.limit_mib = config.limits.bodies_mib
        self.parser.adjust(config)

    def accepting(self) -> dict[str, Any]:
        """The readiness check whether the proxy takes requests."""
        detail = "stopping: no new requests" if self.draining else "accepting requests"
        return {"ok": not self.draining, "detail": detail}
