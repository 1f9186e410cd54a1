"""Vectors of a session's blocks, written down beside its record and gone with it.

A record has parts for them, each with what was embedded since the one before, so that a turn writes
little. They are there for the first question after a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from evoke_proxy.adapters.snapshot_index import Record
from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.vectors import decode_vectors, encode_vectors
from evoke_proxy.engine.embedding.service import EmbeddingService
from evoke_proxy.engine.server.conversations import Conversation
from evoke_proxy.engine.storage.snapshot_repository import SnapshotRepository
from evoke_proxy.errors import SnapshotUnusable

_log = logging.getLogger(__name__)
# Of one session; with 384 numbers and four sentences each that is 12 MiB. The next one begins anew.
_MOST_BLOCKS = 2048


class VectorRecords:
    """Does nothing without an embedder. What is not written down is embedded again."""

    def __init__(self, embedding: EmbeddingService) -> None:
        self._embedding = embedding
        self._there: dict[str, int] = {}

    def read(self, session: str, parts: Iterable[Record]) -> Mapping[str, Vectors]:
        """By label, what these parts of a session's record have."""
        found: dict[str, Vectors] = {}
        for part in parts:
            try:
                found |= decode_vectors(part.packed, self._embedding.mark)
            except ValueError as error:
                _log.warning("vectors of session %s are made anew: %s", session, error)
        self._there[session] = len(found)
        return found

    async def write(self, known: Conversation, vault: SnapshotRepository) -> None:
        """One more part, when there is anything new."""
        fresh, known.budgeted.embedded = known.budgeted.embedded, {}
        new = [(label, vectors) for label, keys in fresh.items() if len(vectors := self._of(keys))]
        if not new:
            return
        there = self._there.get(known.id, 0)
        if there + len(new) > _MOST_BLOCKS:
            vault.remove_record(known.id)
            there = 0
        data = await asyncio.to_thread(encode_vectors, self._embedding.mark, new[-_MOST_BLOCKS:])
        now = vault.clock.now()
        part = f"{known.id}#{int(now * 1e9)}"
        try:
            await vault.write_record(Record(part, known.tenant, now, data))
        except SnapshotUnusable as error:
            _log.warning("vectors of session %s are not written down: %s", known.id, error)
            return
        self._there[known.id] = there + len(new)

    def forget(self, session: str) -> None:
        """Its record has gone, and all parts with it."""
        self._there.pop(session, None)

    def _of(self, keys: Sequence[bytes]) -> Vectors:
        """Those of a block; none when one of them is forgotten already."""
        found = [vector for vector in map(self._embedding.vector, keys) if vector is not None]
        return np.stack(found) if len(found) == len(keys) > 0 else np.zeros((0, 0), np.float32)
