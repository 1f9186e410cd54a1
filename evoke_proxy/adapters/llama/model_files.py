"""The identity of a file of weights, from the little of it that is quick to read."""

from __future__ import annotations

import hashlib
from pathlib import Path

from evoke_proxy.config.regular_files import open_regular
from evoke_proxy.core.snapshots.fingerprint import ModelFile

# The head has the metadata and the names of tensors, the tail some of their values.
_SAMPLE_BYTES = 1024 * 1024


class ModelFiles:
    """Remembers what it has hashed as long as size and time of a file stay the same."""

    def __init__(self) -> None:
        self._known: dict[str, ModelFile] = {}

    def identify(self, path: str) -> ModelFile | None:
        """None when there is no such file here: llama-server runs on another machine, maybe."""
        try:
            stat = Path(path).stat()
            known = self._known.get(path)
            if known and (known.n_bytes, known.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
                return known
            sample = _sample(Path(path), stat.st_size)
        except OSError:
            return None
        self._known[path] = ModelFile(stat.st_size, stat.st_mtime_ns, sample)
        return self._known[path]


def _sample(path: Path, n_bytes: int) -> str:
    with open_regular(path) as file:
        digest = hashlib.sha256(file.read(_SAMPLE_BYTES))
        file.seek(max(0, n_bytes - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
