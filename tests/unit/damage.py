"""Damage as disks and crashes do it."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DAMAGES = 200


@contextmanager
def in_memory() -> Iterator[Path]:
    """A folder where hundreds of files are written and synced at no cost, if there is one."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


def damage(path: Path, how: random.Random) -> None:
    """Cut a file off anywhere, or turn one of its bits over."""
    data = bytearray(path.read_bytes())
    if how.random() < 0.5:
        del data[how.randrange(len(data)) :]
    else:
        data[how.randrange(len(data))] ^= 1 << how.randrange(8)
    path.write_bytes(data)
