"""Snapshot repositories for tests whose calls run in an event loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.core.request.look_ahead import USER
from evoke_proxy.engine.storage.snapshot_repository import SnapshotLabel, SnapshotRepository

TOKENS = np.arange(1, 400, dtype=np.int32)


@contextmanager
def open_repository(folder: Path, metrics: Metrics | None = None) -> Iterator[SnapshotRepository]:
    """Opens a repository in `folder` until the block ends."""
    repository = SnapshotRepository(SnapshotsConfig(directory=str(folder), min_free_mib=0), metrics)
    repository.open()
    try:
        yield repository
    finally:
        repository.close()


async def add_snapshot(repository: SnapshotRepository) -> Any:
    """Adds a snapshot with the tokens TOKENS, written as llama-server does."""
    part = repository.new_part()
    packed_tokens = len(TOKENS).to_bytes(4, "little") + TOKENS.astype("<i4").tobytes()
    n_bytes = (repository.files.directory / part).write_bytes(
        b"qsgg" + bytes(16) + packed_tokens + bytes(500)
    )
    return await repository.add(part, n_bytes, TOKENS, SnapshotLabel("t", "f", "b", USER, 1.0))
