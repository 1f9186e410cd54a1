"""Snapshot files in the directory that llama-server saves slots to: sealed, verified, set aside.

All calls block on the disk; whoever serves requests runs them in a thread.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from evoke_proxy.config.regular_files import open_regular
from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.snapshots import state_file
from evoke_proxy.core.snapshots.disk_format import DiskFormat
from evoke_proxy.errors import ConfigError, SnapshotUnusable

# What llama-server is told to write, until it is known to be whole, and what it becomes.
PART, WHOLE = ".evoke-part", ".evoke-kv"
INDEX = "index.sqlite"
_ASIDE = "quarantine"
_KEPT_ASIDE = 4
# llama-server puts at most so much in front of the list of tokens.
_HEADER_BYTES = 256
_MOVED_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Sealed:
    """A snapshot's file as it is to be found again."""

    n_bytes: int
    checksum: str


class SnapshotFiles:
    """The files of one directory; names are plain, without a path."""

    def __init__(self, directory: Path, disk_format: DiskFormat | None = None) -> None:
        """`disk_format` is how files are stored."""
        self.directory = directory
        self._format = disk_format or DiskFormat()
        self._lock: BinaryIO | None = None

    def prepare(self) -> None:
        """Make the directory ours alone; ConfigError when it cannot be read and written."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.directory.chmod(0o700)
            (self.directory / _ASIDE).mkdir(mode=0o700, exist_ok=True)
            probe = self.directory / f"probe{PART}"
            probe.unlink(missing_ok=True)
            with open_regular(probe, "wb") as file:
                file.write(b"evoke")
            probe.unlink()
        except OSError as error:
            message = f"snapshots.directory: {self.directory} cannot be used: {error.strerror}"
            raise ConfigError(message) from error

    def claim(self, shared: bool = False) -> bool:
        """Keep every other proxy out for as long as this process lives, or with `shared` those that
        do not share; whether nobody else is there, so that it may be put in order.

        ConfigError when one is there already: each would take the other's files for leavings.
        """
        try:
            self._lock = open_regular(self.directory / "lock", "wb")
        except OSError as error:
            message = f"snapshots.directory: {self.directory}/lock: {error.strerror}"
            raise ConfigError(message) from error
        for wait_s in (0.0, *[0.1] * (50 if shared else 0)):  # as long as another puts it in order
            time.sleep(wait_s)
            for how in (fcntl.LOCK_EX, *([fcntl.LOCK_SH] if shared else [])):
                try:
                    fcntl.flock(self._lock, how | fcntl.LOCK_NB)
                except OSError:
                    continue
                return how == fcntl.LOCK_EX
        self.free()
        raise ConfigError(f"snapshots.directory: another evoke-proxy uses {self.directory}")

    def share(self) -> None:
        """Let others in that share it, too."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def free(self) -> None:
        """Let others have it."""
        if self._lock is not None:
            self._lock.close()

    def free_bytes(self) -> int:
        """What the disk has left."""
        return shutil.disk_usage(self.directory).free

    def sizes(self) -> Mapping[str, int]:
        """Every whole snapshot in the directory, with its size; parts of dead saves are deleted."""
        found = {}
        for path in self.directory.iterdir():
            if path.name.endswith(PART):
                path.unlink(missing_ok=True)
            elif path.name.endswith(WHOLE):
                found[path.name] = path.stat().st_size
        return found

    def seal(self, part: str, name: str, n_bytes: int, tokens: Tokens) -> Sealed:
        """Turn what llama-server has written into a snapshot.

        Raises SnapshotUnusable, and deletes it, when it is not there, not as long as it was said to
        be, or not of these tokens: slots are emptied, and taken, behind our back. Or when a restore
        of it would be of no use, because all of it is within the model's windows.
        """
        source = self.directory / part
        try:
            self.receive(part, n_bytes)
            _check_tokens(source, tokens)
            self.complete(part)
            sealed = self._sealed(source, name)
            checksum, n_bytes = _checksum(sealed, sync=True), sealed.stat().st_size
            sealed.rename(self.directory / name)
            self._sync_directory()
        except OSError as error:
            raise SnapshotUnusable("disk", f"{part}: {error.strerror}") from error
        finally:
            source.unlink(missing_ok=True)
            source.with_name(f"sealed-{source.name}").unlink(missing_ok=True)
        return Sealed(n_bytes, checksum)

    def complete(self, part: str) -> int:
        """Add to what llama-server has written what it lacks to be of use where windows slide (see
        core/snapshots/state_file.py); how long it is now. SnapshotUnusable (`window`) where nothing
        helps."""
        with open_regular(self.directory / part, "r+b") as file:
            found = _caches(file)
            if state_file.in_window(found):
                raise SnapshotUnusable("window", f"{part} is of text that is all within windows")
            return _insert(file, state_file.missing(found, _read_by(file)[0]))

    def caches(self, part: str) -> Sequence[state_file.Cache]:
        """What llama-server has written of which caches; none where that cannot be told."""
        with open_regular(self.directory / part) as file:
            return _caches(file)

    def first_cache(self, part: str) -> state_file.Cache | None:
        """The first of them; None where that cannot be told."""
        with open_regular(self.directory / part) as file:
            return state_file.first_cache(*_read_by(file))

    def tokens(self, part: str, n_tokens: int, beginning: Tokens) -> Tokens:
        """Of which tokens a file is that llama-server has written, so many that begin like that;
        none when it is not there, or of others."""
        size = _HEADER_BYTES + 4 * n_tokens
        try:
            with open_regular(self.directory / part) as file:
                head = file.read(size)
        except OSError:
            head = b""
        words = np.frombuffer(head[: len(head) // 4 * 4], "<i4")
        for at in np.flatnonzero(words[: _HEADER_BYTES // 4] == n_tokens):
            found = words[at + 1 : at + 1 + n_tokens]
            if len(found) == n_tokens and np.array_equal(found[: len(beginning)], beginning):
                return found.astype(np.int32)
        return np.zeros(0, np.int32)

    def _sealed(self, source: Path, name: str) -> Path:
        sealed = source.with_name(f"sealed-{source.name}")
        return (
            sealed if self._format.encode_file(str(source), str(sealed), name.encode()) else source
        )

    def lend(self, name: str) -> str:
        """What llama-server is to restore: the snapshot, or what it is decrypted, which the caller
        discards, of its own for each. Raises SnapshotUnusable, and then leaves nothing."""
        lent = f"lent-{uuid.uuid4().hex[:20]}{PART}"
        paths = str(self.directory / name), str(self.directory / lent)
        try:
            return lent if self._format.decode_file(*paths, name.encode()) else name
        except OSError as error:
            self.discard(lent)
            raise SnapshotUnusable("disk", f"{name}: {error.strerror}") from error
        except SnapshotUnusable:
            self.discard(lent)
            raise

    def index_aside(self) -> None:
        """Move an index that is none, or damaged, out of the way; nothing is deleted."""
        for path in self.directory.glob(f"{INDEX}*"):
            path.replace(self.directory / _ASIDE / path.name)

    def receive(self, part: str, n_bytes: int) -> None:
        """Raises SnapshotUnusable unless llama-server has written it here, as long as it says."""
        source = self.directory / part
        try:
            source.chmod(0o600)
            self._check_size(source, n_bytes)
        except FileNotFoundError as error:
            raise SnapshotUnusable("missing", f"llama-server did not write {part}") from error
        except OSError as error:
            raise SnapshotUnusable("disk", f"{part}: {error.strerror}") from error

    def verify(self, name: str, n_bytes: int, checksum: str) -> None:
        """Raises SnapshotUnusable unless the file is the one that was sealed, to the last bit."""
        path = self.directory / name
        try:
            self._check_size(path, n_bytes)
            if _checksum(path) != checksum:
                raise SnapshotUnusable("checksum", f"{name} is not what was saved")
        except FileNotFoundError as error:
            raise SnapshotUnusable("missing", f"{name} is gone") from error
        except OSError as error:
            raise SnapshotUnusable("disk", f"{name}: {error.strerror}") from error

    def checksum(self, name: str) -> str:
        """Of all its bytes."""
        return _checksum(self.directory / name)

    def discard(self, part: str) -> None:
        """Delete a part or a whole one, if it is there."""
        (self.directory / part).unlink(missing_ok=True)

    def set_aside(self, name: str) -> None:
        """Move a bad one out of reach of any restore; a few are kept for whoever wants to look."""
        aside = self.directory / _ASIDE
        if (self.directory / name).exists():
            (self.directory / name).rename(aside / name)
        oldest_first = sorted(aside.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in oldest_first[:-_KEPT_ASIDE]:
            path.unlink()

    def forget_aside(self) -> None:
        """Delete what was set aside."""
        for path in (self.directory / _ASIDE).iterdir():
            path.unlink(missing_ok=True)

    def _check_size(self, path: Path, n_bytes: int) -> None:
        if path.is_symlink():
            raise SnapshotUnusable("foreign", f"{path.name} is a link")
        size = path.stat().st_size
        if size != n_bytes or not n_bytes:
            raise SnapshotUnusable("size", f"{path.name} has {size} bytes, not {n_bytes}")

    def _sync_directory(self) -> None:
        handle = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _checksum(path: Path, sync: bool = False) -> str:
    with open_regular(path) as file:
        digest = hashlib.file_digest(cast(Any, file), "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
    return digest


def _check_tokens(path: Path, tokens: Tokens) -> None:
    wanted = tokens.astype("<i4").tobytes()
    with open_regular(path) as file:
        head = file.read(_HEADER_BYTES + len(wanted))
    # The list of them begins with how many there are.
    if len(tokens).to_bytes(4, "little") + wanted not in head:
        raise SnapshotUnusable("tokens", f"{path.name} holds another prompt")


def _read_by(file: BinaryIO) -> tuple[state_file.Read, int]:
    """How it is read, and its size."""
    handle = file.fileno()
    return lambda at, n_bytes: os.pread(handle, n_bytes, at), os.fstat(handle).st_size


def _caches(file: BinaryIO) -> Sequence[state_file.Cache]:
    return state_file.caches(*_read_by(file))


def _insert(file: BinaryIO, more: Sequence[state_file.Insertion]) -> int:
    """Make room, from the end on, and fill it; the size of the file then."""
    handle, end = file.fileno(), os.fstat(file.fileno()).st_size
    shift = sum(len(item.put) for item in more if not item.over)
    size = end + shift
    for item in reversed(more):
        if item.over:
            _write(handle, item.put, item.at)
            continue
        while end > item.at:
            n_bytes = min(_MOVED_AT_ONCE, end - item.at)
            end -= n_bytes
            _write(handle, os.pread(handle, n_bytes, end), end + shift)
        shift -= len(item.put)
        _write(handle, item.put, item.at + shift)
    return size


def _write(handle: int, data: bytes, at: int) -> None:
    if os.pwrite(handle, data, at) != len(data):
        raise OSError(errno.ENOSPC, "no room for all of it")
