"""The index of snapshots, and records of budgeted sessions: one SQLite file in WAL mode.

Rows may be large, and a change waits for other processes: only `generation` is for the event loop,
everything else runs in a thread. Changes and reads use a connection each, under a lock each.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import zlib
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np

from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.snapshots.disk_format import DiskFormat
from evoke_proxy.core.snapshots.snapshots import Changes, Snapshot
from evoke_proxy.errors import ConfigError, IndexUnusable, SnapshotUnusable

_VERSION = 2
# How long a change waits for that of another proxy.
_WAIT_S = 5.0
_SHARED_WAIT_MS = 500
_TABLE = """
CREATE TABLE IF NOT EXISTS snapshots (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, fingerprint TEXT NOT NULL, branch TEXT NOT NULL,
  kind TEXT NOT NULL, n_bytes INTEGER NOT NULL, checksum TEXT NOT NULL, prefill_s REAL NOT NULL,
  created REAL NOT NULL, used REAL NOT NULL, hits REAL NOT NULL, pinned INTEGER NOT NULL,
  suspect INTEGER NOT NULL, tokens BLOB NOT NULL)
"""
_RECORDS = """
CREATE TABLE IF NOT EXISTS records (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, used REAL NOT NULL, packed BLOB NOT NULL)
"""
_COLUMNS = (
    "id, tenant, fingerprint, branch, kind, n_bytes, checksum, prefill_s, created, used, hits,"
    " pinned, suspect, tokens"
)
# No time after this one, in the year 2242, was ever noted.
_LATEST = 2.0**33
_ALL = f"SELECT {_COLUMNS} FROM snapshots ORDER BY used DESC"
_ONE = f"SELECT {_COLUMNS} FROM snapshots WHERE id = ?"
_MARKS = "SELECT used, hits, pinned, suspect FROM snapshots WHERE id = ?"
_ALL_RECORDS = "SELECT id, tenant, used, packed FROM records ORDER BY used DESC"
_ONE_RECORD = "SELECT id, tenant, used, packed FROM records WHERE id = ?"
_OWNERS = "SELECT id, tenant, used FROM records"
# A record and its parts. A range and not a pattern: an index serves it, and ids have no wildcards.
_REMOVE_RECORD = "DELETE FROM records WHERE id = ?1 OR (id > ?1 || '#' AND id < ?1 || '$')"

# What has changed, for others to read no more than that; of the oldest nobody is told.
_CHANGES_KEPT = 4096
_CHANGES = (
    "CREATE TABLE IF NOT EXISTS changes (version INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT)",
    *(
        f"CREATE TRIGGER IF NOT EXISTS changes_{event} AFTER {event} ON snapshots BEGIN"
        f" INSERT INTO changes (id) VALUES ({row}.id);"
        f" DELETE FROM changes WHERE version <= last_insert_rowid() - {_CHANGES_KEPT}; END"
        for event, row in (("insert", "new"), ("update", "new"), ("delete", "old"))
    ),
)


@dataclass(frozen=True, slots=True)
class Record:
    """What outlives a restart of one budgeted session; `used` in seconds since the epoch. One whose
    id is that of a session, `#` and more is a part of its record, and goes with it."""

    id: str
    tenant: str
    used: float
    packed: bytes

    @property
    def session(self) -> str:
        """Whose it is."""
        return self.id.partition("#")[0]

    @property
    def is_part(self) -> bool:
        """Whether it is but a part."""
        return self.id != self.session


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a record is, without what it says."""

    session: str
    tenant: str
    used: float


class SnapshotIndex:
    """Snapshots and records; a process that dies loses no change.

    Changes raise SnapshotUnusable, and change nothing, when the disk does not take them.
    """

    def __init__(self, path: Path, disk_format: DiskFormat | None = None) -> None:
        """Open or create it, for its owner alone, rows in this form.

        IndexUnusable when it is no index of ours, ConfigError when it cannot be had.
        """
        self._path, self._format = path, disk_format or DiskFormat()
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_NONBLOCK, 0o600))
            if not path.is_file():
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            self._db = _connected(path)
            self._changing = threading.Lock()
            self._generation = 0
            self._db.execute("PRAGMA journal_mode=WAL")
            # A dead process loses nothing then; a machine that loses power may lose the last rows,
            # and files and rows are made to agree at start.
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(_TABLE)
            self._db.execute(_RECORDS)
            for statement in _CHANGES:
                self._db.execute(statement)
            self._check_version()
            for statement in (f"SELECT {_COLUMNS} FROM snapshots", _ALL_RECORDS):
                deque(self._db.execute(statement), maxlen=0)
            self._aside = _connected(path)
            self._reading = threading.Lock()
        except OSError as error:
            raise ConfigError(f"snapshots.directory: {path} cannot be used: {error}") from error
        except sqlite3.DatabaseError as error:
            if not _damaged(error):
                said = f"snapshots.directory: {path} cannot be used: {error}"
                raise ConfigError(said) from error
            self._db.close()
            raise IndexUnusable(f"{path}: {error}") from error

    def close(self) -> None:
        """No call after this."""
        with self._reading:
            self._aside.close()
        with self._changing:
            self._db.close()

    def share(self) -> None:
        """Another process may be changing it: do not wait for it longer than requests may."""
        with self._changing:
            self._db.execute(f"PRAGMA busy_timeout={_SHARED_WAIT_MS}")

    def add(self, snapshot: Snapshot, packed: bytes) -> None:
        """Add one, its tokens as `pack` has made them of it."""
        marks = ",".join("?" * (_COLUMNS.count(",") + 1))
        values = (*_values(snapshot), self._format.encode_row(packed, _about(_values(snapshot))))
        self._change(f"INSERT INTO snapshots ({_COLUMNS}) VALUES ({marks})", values)

    def mark(self, id: str, **values: float) -> None:
        """Change `used`, `hits`, `pinned` or `suspect` of one, and nothing else of it; nothing when
        it is not there."""
        assert values.keys() <= {"used", "hits", "pinned", "suspect"}
        changes = ", ".join(f"{name} = ?" for name in values)
        self._change(f"UPDATE snapshots SET {changes} WHERE id = ?", (*values.values(), id))

    def remove(self, id: str) -> None:
        """Forget it; nothing when it is not there."""
        self._change("DELETE FROM snapshots WHERE id = ?", (id,))

    def all(self) -> Iterator[Snapshot]:
        """Every snapshot, the latest used first, but for rows that are not what was written."""
        return self._read(self._db, _ALL)

    def _read(self, db: sqlite3.Connection, which: str, *values: str) -> Iterator[Snapshot]:
        for row in db.execute(which, values):
            try:
                yield self._snapshot(row)
            except (ValueError, TypeError, zlib.error):
                continue

    def changes(self, since: int, known: Collection[str]) -> Changes:
        """What has changed since a version (-1: nothing is known), for who knows these ids; in any
        thread. Of a known one only its marks are read. Rows that are not what was written count
        as gone."""
        with self._reading:
            self._aside.execute("BEGIN")
            try:
                return self._changes(self._aside, since, known)
            finally:
                self._aside.execute("COMMIT")

    def _changes(self, db: sqlite3.Connection, since: int, known: Collection[str]) -> Changes:
        first, version = db.execute("SELECT min(version), max(version) FROM changes").fetchone()
        version = version or 0
        if since < 0 or version < since or (since < version and since + 1 < first):
            return Changes(version, list(self._read(db, _ALL)), is_complete=True)
        changed = db.execute("SELECT DISTINCT id FROM changes WHERE version > ?", (since,))
        ids = [id for (id,) in changed.fetchall()]
        added, marks = list[Snapshot](), dict[str, tuple[float, float, bool, bool]]()
        for id in ids:
            if id not in known:
                added += self._read(db, _ONE, id)
            elif found := db.execute(_MARKS, (id,)).fetchone():
                marks[id] = (*found[:2], bool(found[2]), bool(found[3]))
        there = {item.id for item in added} | marks.keys()
        return Changes(version, added, marks, [id for id in ids if id not in there])

    def drop_bad(self) -> int:
        """Forget all rows that are not what was written; how many there were."""
        known = {item.id for item in self.all()}, {item.id for item in self.records()}
        n_bad = 0
        for table, ids in zip(("snapshots", "records"), known, strict=True):
            for (id,) in self._db.execute(f"SELECT id FROM {table}").fetchall():
                if id not in ids:
                    n_bad += self._db.execute(f"DELETE FROM {table} WHERE id = ?", (id,)).rowcount
        return n_bad

    def put_record(self, record: Record) -> None:
        """Add it, or replace the one of its id."""
        packed = self._format.encode_row(record.packed, _about((record.id, record.tenant)))
        row = (record.id, record.tenant, record.used, packed)
        self._change("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", row)

    def remove_record(self, id: str) -> None:
        """Forget it and its parts; nothing when it is not there."""
        self._change(_REMOVE_RECORD, (id,))

    def records(self, only: str | None = None) -> list[Record]:
        """Every record, or the only one of this id, the latest used first, but for those that are
        not what was written."""
        wanted = (_ALL_RECORDS,) if only is None else (_ONE_RECORD, (only,))
        found = []
        with self._reading:
            for id, tenant, used, packed in self._aside.execute(*wanted):
                try:
                    opened = self._format.decode_row(packed, _about((id, tenant)))
                except (ValueError, TypeError):
                    continue
                found.append(Record(id, tenant, used, opened))
        return found

    def owners(self) -> list[Owner]:
        """Whose records there are, of each session and of each part; nothing is decrypted."""
        with self._reading:
            rows = self._aside.execute(_OWNERS).fetchall()
        return [Owner(str(id).partition("#")[0], tenant, used) for id, tenant, used in rows]

    def median_used(self) -> float:
        """The median of the times at which anything was used; 0 when there is none.

        One damaged time does not move it.
        """
        both = "SELECT used FROM snapshots UNION ALL SELECT used FROM records"
        found = [used for (used,) in self._db.execute(both) if isinstance(used, float)]
        return median_low([used for used in found if 0.0 <= used < _LATEST] or [0.0])

    def limit_used(self, now: float) -> None:
        """Take what was used later than now for used now: the system's clock was wrong then."""
        for table in ("snapshots", "records"):
            self._change(f"UPDATE {table} SET used = ?1 WHERE used > ?1", (now,))

    def generation(self) -> int:
        """Another number than before whenever another process has changed something.

        Does not wait: while a change is being made, the number is the one from before it.
        """
        if self._changing.acquire(blocking=False):
            try:
                (number,) = self._db.execute("PRAGMA data_version").fetchone()
                self._generation = int(number)
            finally:
                self._changing.release()
        return self._generation

    def _snapshot(self, row: tuple[Any, ...]) -> Snapshot:
        *values, pinned, suspect, closed = row
        packed = zlib.decompress(self._format.decode_row(closed, _about(tuple(values))))
        tokens = np.frombuffer(packed, dtype="<i4").astype(np.int32)
        fields = [*values, bool(pinned), bool(suspect)]
        return Snapshot(*fields, tokens=tokens)

    def _change(self, statement: str, values: tuple[object, ...]) -> None:
        try:
            with self._changing:
                self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise SnapshotUnusable("disk", f"{self._path} cannot be written: {error}") from error

    def _check_version(self) -> None:
        wanted = _VERSION | self._format.key_id << 8
        (found,) = self._db.execute("PRAGMA user_version").fetchone()
        former = self._format.former_key_id
        if former is not None and found == _VERSION | former << 8:
            raise sqlite3.DatabaseError("it was encrypted in the format of an earlier version")
        if found and found & 0xFF == _VERSION and found != wanted:
            said = "was written with another key, or none: name that, or another directory"
            raise ConfigError(f"snapshots.key_file: {self._path} {said}")
        if found not in (0, wanted):
            raise sqlite3.DatabaseError(f"it is of version {found & 0xFF}, not {_VERSION}")
        self._db.execute(f"PRAGMA user_version={wanted}")


def _connected(path: Path) -> sqlite3.Connection:
    """A connection for any thread, one at a time."""
    return sqlite3.connect(path, isolation_level=None, timeout=_WAIT_S, check_same_thread=False)


def pack(tokens: Tokens) -> bytes:
    """Tokens as a row has them; of a long prompt it takes a while."""
    return zlib.compress(tokens.astype("<i4").tobytes(), 1)


def _damaged(error: sqlite3.DatabaseError) -> bool:
    """Whether what is there is of no use, and not only out of reach: one bit is enough for a table
    to have no such column, or for a text to be none, of which Python tells without a code."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return not isinstance(error, sqlite3.OperationalError) or code == sqlite3.SQLITE_ERROR


def _values(item: Snapshot) -> tuple[object, ...]:
    return (
        *(item.id, item.tenant, item.fingerprint, item.branch, item.kind, item.n_bytes),
        *(item.checksum, item.prefill_s, item.created, item.used, item.hits),
        *(int(item.pinned), int(item.suspect)),
    )


def _about(values: tuple[object, ...]) -> bytes:
    """What a row says that never changes: whose it is, of what, which file."""
    return repr(values[: _COLUMNS.split(", ").index("prefill_s")]).encode()
