"""The index of snapshots and the records of budgeted sessions, in one SQLite file in WAL mode.

Rows may be large, and a change waits for changes of other processes. Therefore only `generation`
may be called in the event loop; all other methods run in threads. Changes use one connection and
reads another; each has a lock.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import zlib
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np

from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.snapshots.disk_format import DiskFormat
from evoke_proxy.core.snapshots.snapshots import Changes, Snapshot
from evoke_proxy.errors import ConfigError, IndexUnusable, SnapshotUnusable

_VERSION = 2
# Seconds that a change waits for a change of another process; milliseconds after `share`.
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
# Seconds for each token of a snapshot that states as many seconds as tokens: those of patched
# servers did before version 0.4.
_ASSUMED_S = 0.001
# Times of use from here on (the year 2242) are treated as damaged.
_LATEST = 2.0**33
_ALL = f"SELECT {_COLUMNS} FROM snapshots ORDER BY used DESC"
_ONE = f"SELECT {_COLUMNS} FROM snapshots WHERE id = ?"
_MARKS = "SELECT used, hits, pinned, suspect FROM snapshots WHERE id = ?"
_ALL_RECORDS = "SELECT id, tenant, used, packed FROM records ORDER BY used DESC"
_ONE_RECORD = "SELECT id, tenant, used, packed FROM records WHERE id = ?"
_OWNERS = "SELECT id, tenant, used FROM records"
# Deletes the record ID and its parts `ID#NAME`. "$" is the character after "#". A range of ids uses
# the index of the primary key; a LIKE pattern would not.
_REMOVE_RECORD = "DELETE FROM records WHERE id = ?1 OR (id > ?1 || '#' AND id < ?1 || '$')"

# The table `changes` has the ids of the latest changed rows, so that other processes read only
# these. Triggers fill it and delete its oldest rows.
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
    """The stored state of one budgeted session, or a part of it.

    Attributes:
        id: The id of the session; for a part followed by `#` and the name of the part.
        tenant: The tenant of the session.
        used: Time of the last use, in seconds since the Unix epoch.
        packed: The content, not encrypted: see core/session/codec.py.
    """

    id: str
    tenant: str
    used: float
    packed: bytes

    @property
    def session(self) -> str:
        """The id of the session."""
        return self.id.partition("#")[0]

    @property
    def is_part(self) -> bool:
        """Whether this is a part of a record."""
        return self.id != self.session


@dataclass(frozen=True, slots=True)
class Owner:
    """Session, tenant and last use of a record, without its content; see `Record`."""

    session: str
    tenant: str
    used: float


class SnapshotIndex:
    """Stores the index of snapshots and the records of sessions.

    Written changes survive a kill of the process. A change that cannot be written raises
    SnapshotUnusable (`disk`) and has no effect.
    """

    def __init__(self, path: Path, disk_format: DiskFormat | None = None) -> None:
        """Open the file, or create it readable only by its owner; `disk_format` encodes its rows.

        Raises IndexUnusable when the file is damaged or not an index of this version, and
        ConfigError when it cannot be opened or was written with another encryption key.
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
            # A kill of the process loses nothing. A power failure may lose the last rows: at start
            # rows are compared with the files.
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(_TABLE)
            self._db.execute(_RECORDS)
            for statement in _CHANGES:
                self._db.execute(statement)
            self._check_version()
            for statement in (f"SELECT {_COLUMNS} FROM snapshots", _ALL_RECORDS):
                deque(self._db.execute(statement), maxlen=0)
            self._reader = _connected(path)
            self._reading = threading.Lock()
        except OSError as error:
            raise ConfigError(f"snapshots.directory: {path} cannot be used: {error}") from error
        except sqlite3.DatabaseError as error:
            if not _damaged(error):
                message = f"snapshots.directory: {path} cannot be used: {error}"
                raise ConfigError(message) from error
            self._db.close()
            raise IndexUnusable(f"{path}: {error}") from error

    def close(self) -> None:
        """Close the file; no other method may be called after that."""
        with self._reading:
            self._reader.close()
        with self._changing:
            self._db.close()

    def share(self) -> None:
        """Let changes wait for other processes for only 0.5 s, because requests wait for them."""
        with self._changing:
            self._db.execute(f"PRAGMA busy_timeout={_SHARED_WAIT_MS}")

    def add(self, snapshot: Snapshot, packed: bytes) -> None:
        """Add a snapshot; `packed` is the result of `pack(snapshot.tokens)`."""
        marks = ",".join("?" * (_COLUMNS.count(",") + 1))
        values = (
            *_values(snapshot),
            self._format.encode_row(packed, _fixed_columns(_values(snapshot))),
        )
        self._change(f"INSERT INTO snapshots ({_COLUMNS}) VALUES ({marks})", values)

    def mark(self, id: str, **values: float) -> None:
        """Change `used`, `hits`, `pinned` or `suspect` of a snapshot, if it exists."""
        assert values.keys() <= {"used", "hits", "pinned", "suspect"}
        changes = ", ".join(f"{name} = ?" for name in values)
        self._change(f"UPDATE snapshots SET {changes} WHERE id = ?", (*values.values(), id))

    def remove(self, id: str) -> None:
        """Remove a snapshot, if it exists."""
        self._change("DELETE FROM snapshots WHERE id = ?", (id,))

    def all(self) -> Iterator[Snapshot]:
        """Yield all snapshots, the most recently used first; damaged rows are left out."""
        return self._read(self._db, _ALL)

    def _read(self, db: sqlite3.Connection, which: str, *values: str) -> Iterator[Snapshot]:
        for row in db.execute(which, values):
            try:
                yield self._snapshot(row)
            except (ValueError, TypeError, zlib.error):
                continue

    def changes(self, since: int, cached: Collection[str]) -> Changes:
        """Return the changes since a version of the index. May be called in any thread.

        `since` is the `version` of an earlier result; -1 for all rows. `cached` are ids of
        snapshots that the caller has: only their mutable columns are read. Damaged rows count as
        removed. The result is complete (all rows) if the changes since then are no longer stored.
        """
        with self._reading:
            self._reader.execute("BEGIN")
            try:
                return self._changes(self._reader, since, cached)
            finally:
                self._reader.execute("COMMIT")

    def _changes(self, db: sqlite3.Connection, since: int, cached: Collection[str]) -> Changes:
        first, version = db.execute("SELECT min(version), max(version) FROM changes").fetchone()
        version = version or 0
        if since < 0 or version < since or (since < version and since + 1 < first):
            return Changes(version, list(self._read(db, _ALL)), is_complete=True)
        changed = db.execute("SELECT DISTINCT id FROM changes WHERE version > ?", (since,))
        ids = [id for (id,) in changed.fetchall()]
        added, marks = list[Snapshot](), dict[str, tuple[float, float, bool, bool]]()
        for id in ids:
            if id not in cached:
                added += self._read(db, _ONE, id)
            elif row := db.execute(_MARKS, (id,)).fetchone():
                marks[id] = (*row[:2], bool(row[2]), bool(row[3]))
        existing = {item.id for item in added} | marks.keys()
        return Changes(version, added, marks, [id for id in ids if id not in existing])

    def drop_bad(self) -> int:
        """Remove all damaged rows of snapshots and records, and return their number."""
        intact = {item.id for item in self.all()}, {item.id for item in self.records()}
        n_bad = 0
        for table, ids in zip(("snapshots", "records"), intact, strict=True):
            for (id,) in self._db.execute(f"SELECT id FROM {table}").fetchall():
                if id not in ids:
                    n_bad += self._db.execute(f"DELETE FROM {table} WHERE id = ?", (id,)).rowcount
        return n_bad

    def put_record(self, record: Record) -> None:
        """Add a record, or replace the one with the same id."""
        packed = self._format.encode_row(record.packed, _fixed_columns((record.id, record.tenant)))
        row = (record.id, record.tenant, record.used, packed)
        self._change("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", row)

    def remove_record(self, id: str) -> None:
        """Remove a record with its parts, if it exists."""
        self._change(_REMOVE_RECORD, (id,))

    def records(self, only: str | None = None) -> list[Record]:
        """Return all records, the most recently used first, or only the one with the id `only`.

        Damaged records are left out.
        """
        query = (_ALL_RECORDS,) if only is None else (_ONE_RECORD, (only,))
        records = []
        with self._reading:
            for id, tenant, used, packed in self._reader.execute(*query):
                try:
                    data = self._format.decode_row(packed, _fixed_columns((id, tenant)))
                except (ValueError, TypeError):
                    continue
                records.append(Record(id, tenant, used, data))
        return records

    def owners(self) -> list[Owner]:
        """Return the owners of all records and parts; decrypts nothing."""
        with self._reading:
            rows = self._reader.execute(_OWNERS).fetchall()
        return [Owner(str(id).partition("#")[0], tenant, used) for id, tenant, used in rows]

    def median_used(self) -> float:
        """Return the median time of use of all rows, in seconds since the Unix epoch; 0 without
        rows.

        The median is used because a single damaged time barely changes it.
        """
        both = "SELECT used FROM snapshots UNION ALL SELECT used FROM records"
        times = [used for (used,) in self._db.execute(both) if isinstance(used, float)]
        return median_low([used for used in times if 0.0 <= used < _LATEST] or [0.0])

    def limit_used(self, now: float) -> None:
        """Set times of use that are later than `now` to `now`; the system clock was wrong then."""
        for table in ("snapshots", "records"):
            self._change(f"UPDATE {table} SET used = ?1 WHERE used > ?1", (now,))

    def generation(self) -> int:
        """Return a number that changes whenever another process changes the file.

        Does not block: returns the previous number while this process makes a change.
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
        packed = zlib.decompress(self._format.decode_row(closed, _fixed_columns(tuple(values))))
        tokens = np.frombuffer(packed, dtype="<i4").astype(np.int32)
        fields = [*values, bool(pinned), bool(suspect)]
        snapshot = Snapshot(*fields, tokens=tokens)
        if snapshot.prefill_s == len(tokens):
            return replace(snapshot, prefill_s=len(tokens) * _ASSUMED_S)
        return snapshot

    def _change(self, statement: str, values: tuple[object, ...]) -> None:
        try:
            with self._changing:
                self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise SnapshotUnusable("disk", f"{self._path} cannot be written: {error}") from error

    def _check_version(self) -> None:
        expected = _VERSION | self._format.key_id << 8
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        former = self._format.former_key_id
        if former is not None and version == _VERSION | former << 8:
            raise sqlite3.DatabaseError("it was encrypted in the format of an earlier version")
        if version and version & 0xFF == _VERSION and version != expected:
            cause = "was written with another key, or none: name that, or another directory"
            raise ConfigError(f"snapshots.key_file: {self._path} {cause}")
        if version not in (0, expected):
            raise sqlite3.DatabaseError(f"it is of version {version & 0xFF}, not {_VERSION}")
        self._db.execute(f"PRAGMA user_version={expected}")


def _connected(path: Path) -> sqlite3.Connection:
    """Open a connection that any thread may use, one at a time."""
    return sqlite3.connect(path, isolation_level=None, timeout=_WAIT_S, check_same_thread=False)


def pack(tokens: Tokens) -> bytes:
    """Compress tokens for `SnapshotIndex.add`; takes long for a long prompt."""
    return zlib.compress(tokens.astype("<i4").tobytes(), 1)


def _damaged(error: sqlite3.DatabaseError) -> bool:
    """Whether an error means that the file is damaged, not only inaccessible.

    A flipped bit can make the name of a column unknown (SQLITE_ERROR), or a text invalid, for which
    Python's error has no code.
    """
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return not isinstance(error, sqlite3.OperationalError) or code == sqlite3.SQLITE_ERROR


def _values(item: Snapshot) -> tuple[object, ...]:
    return (
        *(item.id, item.tenant, item.fingerprint, item.branch, item.kind, item.n_bytes),
        *(item.checksum, item.prefill_s, item.created, item.used, item.hits),
        *(int(item.pinned), int(item.suspect)),
    )


def _fixed_columns(values: tuple[object, ...]) -> bytes:
    """Return the columns of a row that never change, as associated data for its encryption."""
    return repr(values[: _COLUMNS.split(", ").index("prefill_s")]).encode()
