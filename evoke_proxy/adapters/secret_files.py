"""Files that only their owner may read: keys of clients, a token, the key of what is at rest."""

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
    """The text of a file; ConfigError, naming the setting, unless only its owner may read it.

    Root is anybody's equal here: it may see to the files of those that it runs.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from error
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise ConfigError(f"{setting}: {path} is no file")
    with os.fdopen(handle, "rb") as file:
        if found.st_mode & 0o077:
            raise ConfigError(f"{setting}: others may read {path}: chmod 600 {path}")
        if os.geteuid() and found.st_uid not in (os.geteuid(), 0):
            raise ConfigError(f"{setting}: {path} belongs to somebody else")
        try:
            return file.read(_MAX_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{setting}: {path} is no text") from error


def read_token(path: Path, setting: str) -> str:
    """The one word of a file, of 16 characters or more; ConfigError as `read_secret`."""
    token = read_secret(path, setting).strip()
    if len(token) < 16 or len(token.split()) != 1 or not token.isascii():
        raise ConfigError(f"{setting}: {path} must hold one word of 16 or more ASCII characters")
    return token


def write_secret(path: Path, text: str) -> None:
    """Replace a file as a whole, for its owner alone: when root does, the one there was.

    Raises OSError.
    """
    part = path.with_name(path.name + ".new")
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        if os.geteuid() == 0 and path.exists():
            was = path.stat()
            os.fchown(handle, was.st_uid, was.st_gid)
        file.write(text)
        file.flush()
        os.fsync(handle)
    part.replace(path)


class KeyFile:
    """Keys as the file has them now: a key that is taken out is refused from then on.

    Raises ConfigError at first when the file cannot be used. Should it be broken later, the keys
    that were read last go on to count; should it be gone, none does. Either is said.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = _look(path)
        self._keys = _keys_of(path)

    @property
    def keys(self) -> Keys:
        """One look at the file's times, and a reading when they have changed."""
        seen = _look(self._path)
        if seen != self._seen:
            self._seen = seen
            self._keys = self._read() if seen else self._gone()
        return self._keys

    def _read(self) -> Keys:
        try:
            return _keys_of(self._path)
        except ConfigError as error:
            _log.error("the keys stay as they were: %s", error)
            return self._keys

    def _gone(self) -> Keys:
        _log.error("security.keys_file: %s is gone: nobody gets in", self._path)
        return Keys.parse("")


def _look(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)


def _keys_of(path: Path) -> Keys:
    try:
        return Keys.parse(read_secret(path, "security.keys_file"))
    except ConfigError as error:
        said = str(error)
        named = said if said.startswith("security.") else f"security.keys_file: {path}: {said}"
        raise ConfigError(named) from error
