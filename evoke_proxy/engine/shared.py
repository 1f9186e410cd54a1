"""What all servers of one proxy share: metrics, events, embedder, snapshots, parser."""

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
    """What all servers of a proxy share; an async context manager around them.

    Attributes:
        homes: URLs of the servers of a pool in their order; empty where there is only one server.
        draining: whether the proxy is stopping.
    """

    def __init__(self, config: Config, homes: tuple[str, ...] = ()) -> None:
        self.homes = homes
        self.draining = False
        self.metrics = Metrics()
        self.feed = EventFeed()
        self.embedding = EmbeddingService(config.embedder, self.metrics)
        self.repository = SnapshotRepository(config.snapshots, self.metrics)
        self.body_memory = BodyMemory(config.limits.remembered_bodies_mib)
        self.parser = RequestParser(config, self.metrics)
        self._keeps = bool(config.snapshots.directory)

    async def __aenter__(self) -> Shared:
        if self._keeps:
            self.repository.open()
        await self.embedding.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.embedding.__aexit__()
        if self._keeps:
            self.repository.close()

    def adjust(self, config: Config) -> None:
        """Continue with another configuration, of the keys that can be changed."""
        self.body_memory.limit_mib = config.limits.remembered_bodies_mib
        self.parser.adjust(config)

    def accepting(self) -> dict[str, Any]:
        """Whether the proxy takes requests, as a check of its readiness."""
        detail = "stopping: no new requests" if self.draining else "accepting requests"
        return {"ok": not self.draining, "detail": detail}
