"""Damages files as disks and crashes do."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DAMAGES = 200


@contextmanager
def in_memory() -> Iterator[Path]:
    """A temporary folder in memory if possible, where syncing hundreds of files is fast."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


def damage(path: Path, rng: random.Random) -> None:
    """Truncates a file at a random byte, or flips one of its bits."""
    data = bytearray(path.read_bytes())
    if rng.random() < 0.5:
        del data[rng.randrange(len(data)) :]
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
