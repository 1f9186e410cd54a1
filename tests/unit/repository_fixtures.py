"""Snapshot repositories for tests, and state files as llama-server writes them."""

from __future__ import annotations

import asyncio
import struct
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
def open_repository(
    folder: Path, metrics: Metrics | None = None, **config: object
) -> Iterator[SnapshotRepository]:
    settings = SnapshotsConfig(directory=str(folder), min_free_mib=0, **config)  # type: ignore[arg-type]
    repository = SnapshotRepository(settings, metrics)
    repository.open()
    try:
        yield repository
    finally:
        repository.close()


def write_state_file(
    folder: Path, part: str, tokens: np.ndarray = TOKENS, state: bytes = b"state"
) -> int:
    """Writes a file as llama-server does: header, tokens, state. Returns its size in bytes."""
    packed_tokens = len(tokens).to_bytes(4, "little") + tokens.astype("<i4").tobytes()
    data = b"qsgg" + bytes(16) + packed_tokens + state * 100
    return (folder / part).write_bytes(data)


def add_snapshot(
    open_repository: SnapshotRepository,
    tokens: np.ndarray = TOKENS,
    branch: str = "b",
    kind: str = USER,
) -> Snapshot:
    part = open_repository.new_part()
    n_bytes = write_state_file(open_repository.files.directory, part, tokens)
    label = SnapshotLabel("t", "f", branch, kind, 1.0)
    return asyncio.run(open_repository.add(part, n_bytes, tokens, label))


def whole_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.evoke-*"))


def write_block_file(folder: Path, number: int, tenant: str, names: dict[str, str]) -> Path:
    """Write a block file with this head, and rows that nothing reads."""
    texts = [tenant, *(text for pair in names.items() for text in pair)]
    packed = [struct.pack("<Q", len(text.encode())) + text.encode() for text in texts]
    head = struct.pack("<4Q2i", 1, 2, 3, 4, 0, 64)
    head += packed[0] + struct.pack("<Q", len(names)) + b"".join(packed[1:])
    head += bytes(-(48 + len(head)) % 64)
    fixed = struct.pack("<8sII4Q", b"evokeKVB", 3, 0x01020304, 48 + len(head), 4, 0, 0)
    path = folder / f"evoke-{number:032x}.kvb"
    path.write_bytes(fixed + head + b"rows")
    return path
