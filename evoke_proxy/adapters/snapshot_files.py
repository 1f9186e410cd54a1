"""Manages the snapshot files in the directory that llama-server saves slots to.

llama-server saves a slot to a *part file*. The proxy checks it, completes and encrypts it if
necessary, and renames it: it is then a *sealed* snapshot. A snapshot is verified before each
restore; a corrupt one is moved to quarantine. All methods block on the disk and run in threads.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from evoke_proxy.core.prompt.rendered import Tokens
from evoke_proxy.core.snapshots import state_file
from evoke_proxy.core.snapshots.disk_format import DiskFormat
from evoke_proxy.errors import ConfigError, SnapshotUnusable
from evoke_proxy.file_checksums import checksum, is_intact
from evoke_proxy.regular_files import open_regular, sync_directory

# Suffixes of the file that llama-server writes, and of the sealed snapshot.
PART, SEALED = ".evoke-part", ".evoke-kv"
# Suffix of the empty file that stands for a slot whose rows are not verified.
_UNVERIFIED = ".evoke-unverified"
INDEX = "index.sqlite"
_QUARANTINE = "quarantine"
_QUARANTINED_FILES = 4
# Most bytes that llama-server writes before the list of tokens in a slot file.
_HEADER_BYTES = 256
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Sealed:
    """Size and checksum of a sealed snapshot file, for later verification.

    Attributes:
        n_bytes: Size of the file in bytes.
        checksum: That of the file, see evoke_proxy/file_checksums.py. If the form of the file is
            known and it is not encrypted, `:` and the XXH3 of everything but the rows follow.
    """

    n_bytes: int
    checksum: str

    @property
    def of_file(self) -> str:
        """The checksum of the file."""
        return ":".join(self.checksum.split(":")[:2])

    @property
    def of_frame(self) -> str:
        """The XXH3 of everything but the rows; empty when it was not computed."""
        return ":".join(self.checksum.split(":")[2:])


class SnapshotFiles:
    """The snapshot files of one directory; methods take file names without a path."""

    def __init__(self, directory: Path, disk_format: DiskFormat | None = None) -> None:
        """Use a directory; `disk_format` encrypts sealed files, by default they are plain."""
        self.directory = directory
        self._format = disk_format or DiskFormat()
        self._lock: BinaryIO | None = None

    def prepare(self) -> None:
        """Create the directory, accessible only for its owner, and write a test file.

        Raises ConfigError when that fails.
        """
        with self._usable():
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.directory.chmod(0o700)
            (self.directory / _QUARANTINE).mkdir(mode=0o700, exist_ok=True)
            self._write_test_file()

    def check(self, as_owner: bool = True) -> None:
        """Raise ConfigError where `prepare` would; changes nothing, and deletes its test file.

        Without `as_owner`, this process may run as another user than the proxy will: the directory
        then need not be writable, or visible.
        """
        with self._usable():
            try:
                self._check(as_owner)
            except PermissionError:
                if as_owner:
                    raise

    def _check(self, as_owner: bool) -> None:
        if self.directory.exists():
            if not self.directory.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            if not as_owner:
                return
            if os.geteuid() not in (0, self.directory.stat().st_uid):  # `prepare` sets the mode
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            self._write_test_file()
            return
        parent = next(path for path in self.directory.absolute().parents if path.exists())
        if not parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if as_owner and not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def _write_test_file(self) -> None:
        # A running proxy may test the directory, too.
        probe = self.directory / f"probe-{uuid.uuid4().hex[:20]}{PART}"
        try:
            with open_regular(probe, "wb") as file:
                file.write(b"evoke")
        finally:
            probe.unlink(missing_ok=True)

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Raise ConfigError for an OSError within the context."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"snapshots.directory: {self.directory} cannot be used: {error.strerror}; name a"
                " directory that belongs to the user of the proxy"
            ) from error

    def claim(self, shared: bool = False) -> bool:
        """Lock the directory against other proxies; returns whether the lock is exclusive.

        With `shared`, other proxies may hold a shared lock at the same time. Only a proxy with an
        exclusive lock may delete files that it does not know. Raises ConfigError when another proxy
        holds a lock that excludes this one; with `shared` after 5 seconds. The lock ends with the
        process.
        """
        try:
            self._lock = open_regular(self.directory / "lock", "wb")
        except OSError as error:
            message = f"snapshots.directory: {self.directory}/lock: {error.strerror}"
            raise ConfigError(message) from error
        for wait_s in (0.0, *[0.1] * (50 if shared else 0)):  # while another proxy cleans up
            time.sleep(wait_s)
            for how in (fcntl.LOCK_EX, *([fcntl.LOCK_SH] if shared else [])):
                try:
                    fcntl.flock(self._lock, how | fcntl.LOCK_NB)
                except OSError:
                    continue
                return how == fcntl.LOCK_EX
        self.unlock()
        raise ConfigError(
            f"snapshots.directory: another evoke-proxy uses {self.directory}: stop it first, or"
            " name another directory"
        )

    def share(self) -> None:
        """Turn the exclusive lock into a shared one, so that other proxies may start."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def unlock(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()

    def free_bytes(self) -> int:
        """Return the free bytes of the disk."""
        return shutil.disk_usage(self.directory).free

    def delete_parts(self) -> None:
        """Delete the part files that earlier saves have left."""
        for path in self.directory.iterdir():
            if path.name.endswith(PART):
                path.unlink(missing_ok=True)

    def sizes(self) -> Mapping[str, int]:
        """Return the sizes of all snapshots in bytes, by name."""
        paths = (path for path in self.directory.iterdir() if path.name.endswith(SEALED))
        return {path.name: path.stat().st_size for path in paths}

    def seal(self, part: str, name: str, n_bytes: int, tokens: Tokens) -> Sealed:
        """Turn a part file of llama-server into the sealed snapshot `name`.

        `n_bytes` is the size that llama-server reported, `tokens` the prompt that it saved. Deletes
        the part file in any case. Raises SnapshotUnusable when the part file is missing, has
        another size, or contains other tokens, because llama-server may have emptied or reused the
        slot; and when all tokens are within the sliding windows of the model.
        """
        source = self.directory / part
        try:
            self.receive(part, n_bytes)
            _check_tokens(source, tokens)
            self.complete(part)
            sealed = self._encoded(source, name)
            parts, n_bytes = [checksum(sealed, sync=True)], sealed.stat().st_size
            if sealed == source and (of_frame := _frame_checksum(source)):
                parts.append(of_frame)
            sealed.rename(self.directory / name)
            sync_directory(self.directory)
        except OSError as error:
            raise SnapshotUnusable("disk", f"{part}: {error.strerror}") from error
        finally:
            source.unlink(missing_ok=True)
            source.with_name(f"sealed-{source.name}").unlink(missing_ok=True)
        return Sealed(n_bytes, ":".join(parts))

    def complete(self, part: str) -> int:
        """Add the parts that llama-server does not save for layers with a sliding window.

        Returns the new size of the part file, in bytes. See core/snapshots/state_file.py. Raises
        SnapshotUnusable (`window`) when all tokens are within the windows.
        """
        with open_regular(self.directory / part, "r+b") as file:
            caches = _caches(file)
            if state_file.in_window(caches):
                raise SnapshotUnusable(
                    "window", f"all tokens of {part} are within the sliding windows"
                )
            return _insert(file, state_file.missing(caches, _read_by(file)[0]))

    def caches(self, part: str) -> Sequence[state_file.Cache]:
        """Return the KV caches in a part file; empty when they cannot be determined."""
        with open_regular(self.directory / part) as file:
            return _caches(file)

    def has_checkpoints(self, part: str) -> bool:
        """Return whether a slot restored from such a part file goes back to a checkpoint."""
        with open_regular(self.directory / part) as file:
            return state_file.has_checkpoints(*_read_by(file))

    def first_cache(self, part: str) -> state_file.Cache | None:
        """Return the first KV cache in a part file; None when it cannot be determined."""
        with open_regular(self.directory / part) as file:
            return state_file.first_cache(*_read_by(file))

    def tokens(self, part: str, n_tokens: int, beginning: Tokens) -> Tokens:
        """Return the tokens in a part file, which has `n_tokens` that begin with `beginning`.

        Empty when the file cannot be read or contains other tokens.
        """
        size = _HEADER_BYTES + 4 * n_tokens
        try:
            with open_regular(self.directory / part) as file:
                head = file.read(size)
        except OSError:
            head = b""
        words = np.frombuffer(head[: len(head) // 4 * 4], "<i4")
        for at in np.flatnonzero(words[: _HEADER_BYTES // 4] == n_tokens):
            tokens = words[at + 1 : at + 1 + n_tokens]
            if len(tokens) == n_tokens and np.array_equal(tokens[: len(beginning)], beginning):
                return tokens.astype(np.int32)
        return np.zeros(0, np.int32)

    def _encoded(self, source: Path, name: str) -> Path:
        sealed = source.with_name(f"sealed-{source.name}")
        return (
            sealed if self._format.encode_file(str(source), str(sealed), name.encode()) else source
        )

    def decrypt(self, name: str) -> str:
        """Return the name of a file from which llama-server can restore a snapshot.

        That is the snapshot itself if it is not encrypted. Otherwise it is a new decrypted copy,
        which the caller deletes with `discard`. Raises SnapshotUnusable, and then leaves no copy.
        """
        copy = f"decrypted-{uuid.uuid4().hex[:20]}{PART}"
        paths = str(self.directory / name), str(self.directory / copy)
        try:
            return copy if self._format.decode_file(*paths, name.encode()) else name
        except OSError as error:
            self.discard(copy)
            raise SnapshotUnusable("disk", f"{name}: {error.strerror}") from error
        except SnapshotUnusable:
            self.discard(copy)
            raise

    def quarantine_index(self) -> None:
        """Move a damaged index to quarantine."""
        for path in self.directory.glob(f"{INDEX}*"):
            path.replace(self.directory / _QUARANTINE / path.name)

    def receive(self, part: str, n_bytes: int) -> None:
        """Check that a part file exists and has `n_bytes` bytes; make it readable only by its
        owner.

        Raises SnapshotUnusable otherwise.
        """
        source = self.directory / part
        try:
            source.chmod(0o600)
            self._check_size(source, n_bytes)
        except FileNotFoundError as error:
            text = f"llama-server did not write {part} to {self.directory}"
            if not self.directory.is_dir():
                text = f"{self.directory} does not exist, as seen from the proxy"
            raise SnapshotUnusable("missing", text) from error
        except OSError as error:
            raise SnapshotUnusable("disk", f"{part}: {error.strerror}") from error

    def verify(self, name: str, sealed: Sealed, follow: bool = False) -> None:
        """Raise SnapshotUnusable unless a snapshot has this size and checksum.

        With `follow`, llama-server reads the file now, and this reads what it has read.
        """
        path = self.directory / name
        try:
            self._check_size(path, sealed.n_bytes)
            if not is_intact(path, sealed.of_file, follow):
                raise SnapshotUnusable("checksum", f"{name} has changed since it was saved")
        except FileNotFoundError as error:
            raise SnapshotUnusable("missing", f"{name} does not exist") from error
        except OSError as error:
            raise SnapshotUnusable("disk", f"{name}: {error.strerror}") from error

    def has_sound_frame(self, name: str, sealed: Sealed) -> bool:
        """Return whether only rows can have changed in a snapshot, which llama-server only copies.

        False when that is not known, for example of a snapshot of an earlier version.
        """
        path = self.directory / name
        try:
            self._check_size(path, sealed.n_bytes)
            return bool(sealed.of_frame) and _frame_checksum(path) == sealed.of_frame
        except (OSError, SnapshotUnusable):
            return False

    def checksum(self, name: str) -> str:
        """Return the checksum of a file, see `Sealed`; raises OSError."""
        return checksum(self.directory / name)

    def mark_unverified(self, server: str, slot: int) -> None:
        """Record that a slot of a server may have damaged rows; raises OSError."""
        with open_regular(self._unverified_path(server, slot), "wb"):
            pass

    def unmark_unverified(self, server: str, slot: int) -> None:
        """Delete the record of `mark_unverified`, if it exists."""
        self._unverified_path(server, slot).unlink(missing_ok=True)

    def unverified(self) -> Mapping[str, int]:
        """Return the slot of each record of `mark_unverified`, of all servers, by file name."""
        names = [path.name for path in self.directory.glob(f"*-*{_UNVERIFIED}")]
        slots = {name: name.removesuffix(_UNVERIFIED).partition("-")[2] for name in names}
        return {name: int(slot) for name, slot in slots.items() if slot.isdecimal()}

    def _unverified_path(self, server: str, slot: int) -> Path:
        return self.directory / f"{_digest(server)}-{slot}{_UNVERIFIED}"

    def discard(self, part: str) -> None:
        """Delete a part file or a snapshot, if it exists."""
        (self.directory / part).unlink(missing_ok=True)

    def quarantine(self, name: str) -> None:
        """Move a corrupt snapshot to quarantine, where the latest few are kept for inspection."""
        folder = self.directory / _QUARANTINE
        if (self.directory / name).exists():
            (self.directory / name).rename(folder / name)
        oldest_first = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in oldest_first[:-_QUARANTINED_FILES]:
            path.unlink()

    def delete_quarantined(self) -> None:
        """Delete the files in quarantine."""
        for path in (self.directory / _QUARANTINE).iterdir():
            path.unlink(missing_ok=True)

    def _check_size(self, path: Path, n_bytes: int) -> None:
        if path.is_symlink():
            raise SnapshotUnusable("foreign", f"{path.name} is a symbolic link")
        size = path.stat().st_size
        if size != n_bytes or not n_bytes:
            raise SnapshotUnusable("size", f"{path.name} has {size} bytes, not {n_bytes}")


def _frame_checksum(path: Path) -> str:
    """Return the XXH3 of all bytes of a file that are not rows; empty if its form is unknown."""
    digest = xxhash.xxh3_128()
    with open_regular(path) as file:
        read, size = _read_by(file)
        frame = state_file.frame(read, size)
        for start, end in frame:
            digest.update(read(start, end - start))
    return digest.hexdigest() if frame else ""


def _digest(server: str) -> str:
    return hashlib.sha256(server.encode()).hexdigest()[:16]


def _check_tokens(path: Path, tokens: Tokens) -> None:
    expected = tokens.astype("<i4").tobytes()
    with open_regular(path) as file:
        head = file.read(_HEADER_BYTES + len(expected))
    # The list of tokens begins with their number.
    if len(tokens).to_bytes(4, "little") + expected not in head:
        raise SnapshotUnusable("tokens", f"{path.name} contains another prompt")


def _read_by(file: BinaryIO) -> tuple[state_file.Read, int]:
    """Return a function that reads from a file, and the size of the file in bytes."""
    handle = file.fileno()
    return lambda at, n_bytes: os.pread(handle, n_bytes, at), os.fstat(handle).st_size


def _caches(file: BinaryIO) -> Sequence[state_file.Cache]:
    return state_file.caches(*_read_by(file))


def _insert(file: BinaryIO, more: Sequence[state_file.Insertion]) -> int:
    """Insert or overwrite bytes in a file, and return its new size.

    Works in place from the end of the file to its beginning.
    """
    handle, end = file.fileno(), os.fstat(file.fileno()).st_size
    shift = sum(len(item.put) for item in more if not item.over)
    size = end + shift
    for item in reversed(more):
        if item.over:
            _write(handle, item.put, item.at)
            continue
        while end > item.at:
            n_bytes = min(_COPY_BYTES, end - item.at)
            end -= n_bytes
            _write(handle, os.pread(handle, n_bytes, end), end + shift)
        shift -= len(item.put)
        _write(handle, item.put, item.at + shift)
    return size


def _write(handle: int, data: bytes, at: int) -> None:
    if os.pwrite(handle, data, at) != len(data):
        raise OSError(errno.ENOSPC, "not all bytes could be written")
