"""Damage as disks and crashes do it."""

from __future__ import annotations

import random
from pathlib import Path


def damage(path: Path, how: random.Random) -> None:
    """Cut a file off anywhere, or turn one of its bits over."""
    data = bytearray(path.read_bytes())
    if how.random() < 0.5:
        del data[how.randrange(len(data)) :]
    else:
        data[how.randrange(len(data))] ^= 1 << how.randrange(8)
    path.write_bytes(data)
