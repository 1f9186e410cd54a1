"""Keeps files that are fetched once, each pinned by its hash."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def pinned(path: Path, sha256: str, fetch: Callable[[Path], None], error: type[Exception]) -> Path:
    """Return a file that is there already, or that `fetch` writes into the folder it is given.

    Raises `error` when the file has another hash; it is removed then.
    """
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as scratch:
            fetch(Path(scratch))
            os.replace(Path(scratch) / path.name, path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        path.unlink()
        raise error(f"{path} has sha256 {found}, expected {sha256}, and was removed")
    return path
