"""One llama-server, or one model behind a router, with its records and snapshots."""

from __future__ import annotations

from dataclasses import dataclass

from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.engine.embedding.service import EmbeddingService
from evoke_proxy.engine.server.server import Server
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository
from evoke_proxy.engine.strategies.budgeted.session_records import SessionPersistence


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ServedModel:
    """One llama-server, or one model behind a router; an async context manager."""

    server: Server
    # Owns the snapshots and their files; None without a directory for them.
    repository: SnapshotRepository | None
    # Owns the records of sessions on disk.
    records: SessionPersistence
    # Owns the vectors of blocks.
    embedding: EmbeddingService
    # Name of the server in `pool.upstreams`; empty where there is only one.
    server_name: str = ""

    async def __aenter__(self) -> ServedModel:
        await self.server.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.__aexit__()

    @property
    def client(self) -> LlamaClient:
        """Makes the calls; for a model behind a router, it is bound to that model."""
        return self.server.client
