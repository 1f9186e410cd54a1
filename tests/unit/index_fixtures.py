"""Snapshot repositories whose calls are awaited, for tests."""

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
def vault(folder: Path, metrics: Metrics | None = None) -> Iterator[SnapshotRepository]:
    opened = SnapshotRepository(SnapshotsConfig(directory=str(folder), min_free_mib=0), metrics)
    opened.open()
    try:
        yield opened
    finally:
        opened.close()


async def kept(it: SnapshotRepository) -> Any:
    part = it.new_part()
    listed = len(TOKENS).to_bytes(4, "little") + TOKENS.astype("<i4").tobytes()
    n_bytes = (it.files.directory / part).write_bytes(b"qsgg" + bytes(16) + listed + bytes(500))
    return await it.add(part, n_bytes, TOKENS, SnapshotLabel("t", "f", "b", USER, 1.0))
