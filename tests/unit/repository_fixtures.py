"""Snapshot repositories for tests, and files as llama-server writes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from evoke_proxy.adapters.metrics import Metrics
from evoke_proxy.config import SnapshotsConfig
from evoke_proxy.core.request.look_ahead import USER
from evoke_proxy.core.snapshots.snapshots import Snapshot
from evoke_proxy.engine.storage.snapshot_repository import SnapshotLabel, SnapshotRepository

TOKENS = np.arange(1, 400, dtype=np.int32)


@contextmanager
def vault(
    folder: Path, metrics: Metrics | None = None, **config: object
) -> Iterator[SnapshotRepository]:
    settings = SnapshotsConfig(directory=str(folder), min_free_mib=0, **config)  # type: ignore[arg-type]
    opened = SnapshotRepository(settings, metrics)
    opened.open()
    try:
        yield opened
    finally:
        opened.close()


def written(folder: Path, part: str, tokens: np.ndarray = TOKENS, more: bytes = b"state") -> int:
    """A file as llama-server writes it: a header, the tokens, the state."""
    listed = len(tokens).to_bytes(4, "little") + tokens.astype("<i4").tobytes()
    data = b"qsgg" + bytes(16) + listed + more * 100
    return (folder / part).write_bytes(data)


def kept(
    vault: SnapshotRepository, tokens: np.ndarray = TOKENS, branch: str = "b", kind: str = USER
) -> Snapshot:
    part = vault.new_part()
    n_bytes = written(vault.files.directory, part, tokens)
    label = SnapshotLabel("t", "f", branch, kind, 1.0)
    return asyncio.run(vault.add(part, n_bytes, tokens, label))


def whole_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.evoke-*"))
