"""Reads and writes secret files, which only their owner may read.

They contain the client keys, the admin token, or the encryption key of snapshots.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from evoke_proxy.core.tenants.api_keys import Keys
from evoke_proxy.errors import ConfigError

_log = logging.getLogger(__name__)
_MAX_BYTES = 16 * 1024 * 1024


def read_secret(path: Path, setting: str) -> str:
    """Return the text of a secret file; `setting` is the setting that names it, for errors.

    Raises ConfigError when the file cannot be read, is not a regular file or not UTF-8, when other
    users may read it, or when it belongs to another user. Files of root are accepted, and root may
    read the files of every user.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from error
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise ConfigError(f"{setting}: {path} is not a regular file")
    with os.fdopen(handle, "rb") as file:
        if status.st_mode & 0o077:
            raise ConfigError(f"{setting}: others may read {path}: chmod 600 {path}")
        if os.geteuid() and status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"{setting}: {path} belongs to another user")
        try:
            return file.read(_MAX_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{setting}: {path} is not UTF-8 text") from error
        except OSError as error:
            raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from error


def read_token(path: Path, setting: str) -> str:
    """Return the token in a secret file.

    Raises ConfigError as `read_secret`, and when the file is not one word of 16 or more ASCII
    characters.
    """
    token = read_secret(path, setting).strip()
    if len(token) < 16 or len(token.split()) != 1 or not token.isascii():
        raise ConfigError(f"{setting}: {path} must hold one word of 16 or more ASCII characters")
    return token


def write_secret(path: Path, text: str) -> None:
    """Write a secret file, or replace it atomically; only its owner may read it. Raises OSError.

    A file that root replaces keeps its owner.
    """
    part = path.with_name(path.name + ".new")
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        if os.geteuid() == 0 and path.exists():
            owner = path.stat()
            os.fchown(handle, owner.st_uid, owner.st_gid)
        file.write(text)
        file.flush()
        os.fsync(handle)
    part.replace(path)


class KeyFile:
    """The client keys of a file, read again when the file changes.

    The constructor raises ConfigError when the file cannot be read. When it becomes unreadable
    later, the keys that were read last stay valid; when it is deleted, no key is valid. Both are
    logged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version = _version(path)
        self._keys = _keys_of(path)

    @property
    def keys(self) -> Keys:
        """The current keys; each access checks whether the file has changed."""
        version = _version(self._path)
        if version != self._version:
            self._version = version
            self._keys = self._read() if version else self._deleted()
        return self._keys

    def _read(self) -> Keys:
        try:
            return _keys_of(self._path)
        except ConfigError as error:
            _log.error(
                "the changed client keys cannot be read; the earlier ones stay valid: %s", error
            )
            return self._keys

    def _deleted(self) -> Keys:
        _log.error("security.keys_file: %s was deleted: all client keys are refused", self._path)
        return Keys.parse("")


def _version(path: Path) -> tuple[int, ...]:
    """Return inode, times and size of a file, which differ after a change; () without a file."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return (status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size)


def _keys_of(path: Path) -> Keys:
    try:
        return Keys.parse(read_secret(path, "security.keys_file"))
    except ConfigError as error:
        text = str(error)
        if not text.startswith("security."):
            text = f"security.keys_file: {path}: {text}"
        raise ConfigError(text) from error
