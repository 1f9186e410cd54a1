"""The index of snapshots: one SQLite file in WAL mode, every snapshot a row.

Rows are small and local: calls take well under a millisecond and may run in the event loop.
"""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from evoke_proxy.core.snapshots import Snapshot
from evoke_proxy.errors import ConfigError

_VERSION = 1
_TABLE = """
CREATE TABLE IF NOT EXISTS snapshots (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, fingerprint TEXT NOT NULL, branch TEXT NOT NULL,
  kind TEXT NOT NULL, n_bytes INTEGER NOT NULL, checksum TEXT NOT NULL, prefill_s REAL NOT NULL,
  created REAL NOT NULL, used REAL NOT NULL, hits REAL NOT NULL, pinned INTEGER NOT NULL,
  suspect INTEGER NOT NULL, tokens BLOB NOT NULL)
"""
_COLUMNS = (
    "id, tenant, fingerprint, branch, kind, n_bytes, checksum, prefill_s, created, used, hits,"
    " pinned, suspect, tokens"
)


class Store:
    """Snapshots as they were last put; every change is on disk when a call returns."""

    def __init__(self, path: Path) -> None:
        """Open or create it, for its owner alone. ConfigError when it is no index of ours."""
        self._path = path
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(_TABLE)
            self._check_version()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"snapshots.directory: {path} cannot be used: {error}") from error

    def close(self) -> None:
        """No call after this."""
        self._db.close()

    def put(self, snapshot: Snapshot) -> None:
        """Add it, or replace the one of its id."""
        marks = ",".join("?" * (_COLUMNS.count(",") + 1))
        self._db.execute(
            f"INSERT OR REPLACE INTO snapshots ({_COLUMNS}) VALUES ({marks})", _row(snapshot)
        )

    def remove(self, id: str) -> None:
        """Forget it; nothing when it is not there."""
        self._db.execute("DELETE FROM snapshots WHERE id = ?", (id,))

    def all(self) -> Iterator[Snapshot]:
        """Every snapshot, the latest used first."""
        for row in self._db.execute(f"SELECT {_COLUMNS} FROM snapshots ORDER BY used DESC"):
            yield _snapshot(row)

    def generation(self) -> int:
        """Another number than before whenever another process has changed something."""
        (number,) = self._db.execute("PRAGMA data_version").fetchone()
        return int(number)

    def _check_version(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise sqlite3.DatabaseError(f"it is of version {version}, not {_VERSION}")
        self._db.execute(f"PRAGMA user_version={_VERSION}")


def _row(item: Snapshot) -> tuple[object, ...]:
    packed = zlib.compress(item.tokens.astype("<i4").tobytes(), 1)
    return (
        *(item.id, item.tenant, item.fingerprint, item.branch, item.kind, item.n_bytes),
        *(item.checksum, item.prefill_s, item.created, item.used, item.hits),
        *(int(item.pinned), int(item.suspect), packed),
    )


def _snapshot(row: tuple[object, ...]) -> Snapshot:
    *values, pinned, suspect, packed = row
    assert isinstance(packed, bytes)
    tokens = np.frombuffer(zlib.decompress(packed), dtype="<i4").astype(np.int32)
    fields = [*values, bool(pinned), bool(suspect)]
    return Snapshot(*fields, tokens=tokens)  # type: ignore[arg-type]
