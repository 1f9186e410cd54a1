"""A journal of finished sessions: one JSON line for each session and arm."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench
import evoke_proxy

Record = Mapping[str, Any]

# What decides an answer: all of the proxy that runs, and how sessions are made and driven.
_OURS = ("adapters", "config", "core", "engine", "web")
_BENCH = ("model/facts.py", "model/tasks.py", "model/text.py", "model/vocab.py", "ruler.py")
_QUALITY = ("quality/arms.py", "quality/drive.py", "quality/sessions.py", "quality/stack.py")


def fingerprint(model: Path, server: Path) -> str:
    """Return a hash of everything a result depends on: model, server, sources, sessions."""
    package, benches = Path(evoke_proxy.__file__).parent, Path(bench.__file__).parent
    sources = [path for name in _OURS for path in sorted((package / name).rglob("*.py"))]
    sources += [benches / name for name in (*_BENCH, *_QUALITY)]
    total = hashlib.sha256(server.resolve().parent.name.encode())
    for path in (model, *sources):
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


class Journal:
    """The lines of one file. Threads and processes may append; a line cut off is passed over."""

    def __init__(self, path: Path, config: str) -> None:
        self._path = path
        self._config = config
        self._lock = threading.Lock()

    def records(self) -> dict[str, Record]:
        """Return the records of this configuration by the key of their unit; the latest counts."""
        return {record["unit"]: record for record in self._read()}

    def append(self, key: str, record: Record) -> None:
        """Append one record in a single write."""
        line = json.dumps({"config": self._config, "unit": key, **record}, separators=(",", ":"))
        with self._lock:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                file.write(f"{line}\n".encode())

    def _read(self) -> Iterator[Record]:
        if not self._path.exists():
            return
        for line in self._path.read_text("utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record.get("config") == self._config:
                yield record


def chosen(records: Mapping[str, Record], keys: Iterable[str]) -> Sequence[Record]:
    """Those of the records that these units left."""
    return [records[key] for key in keys if key in records]
