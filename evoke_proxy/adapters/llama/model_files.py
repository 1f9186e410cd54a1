"""Identifies model files by size, time and a hash of their first and last bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from evoke_proxy.config.regular_files import open_regular
from evoke_proxy.core.snapshots.fingerprint import ModelFile

# Bytes hashed at each end: the head has metadata and tensor names, the tail has tensor values.
_SAMPLE_BYTES = 1024 * 1024


class ModelFiles:
    """Caches the hash of a file while its size and modification time stay the same."""

    def __init__(self) -> None:
        self._cache: dict[str, ModelFile] = {}

    def identify(self, path: str) -> ModelFile | None:
        """The identity of a file.

        None when it cannot be read here: llama-server may run on another machine.
        """
        try:
            stat = Path(path).stat()
            cached = self._cache.get(path)
            if cached and (cached.n_bytes, cached.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
                return cached
            sample = _sample(Path(path), stat.st_size)
        except OSError:
            return None
        self._cache[path] = ModelFile(stat.st_size, stat.st_mtime_ns, sample)
        return self._cache[path]


def _sample(path: Path, n_bytes: int) -> str:
    with open_regular(path) as file:
        digest = hashlib.sha256(file.read(_SAMPLE_BYTES))
        file.seek(max(0, n_bytes - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
