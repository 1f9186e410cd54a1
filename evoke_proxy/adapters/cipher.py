"""What is kept on disk of conversations, encrypted.

AES-256-GCM in the way of STREAM (Hoang, Reyhanitabar, Rogaway, Vizár 2015): pieces of 1 MiB, each
under a nonce of its number and whether it is the last, all under a key made of the given one and of
salt (HKDF-SHA256) that every file and row has of its own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evoke_proxy.core.snapshots.at_rest import Plain
from evoke_proxy.errors import ConfigError, SnapshotUnusable

_PIECE, _TAG, _SALT = 1024 * 1024, 16, 16
_MAGIC = b"EVOKE\0G1"
_SETTING = "snapshots.key_file"


class Cipher(Plain):
    """Encrypted with a key of 256 bits."""

    def __init__(self, key: bytes) -> None:
        """ConfigError when the library for it is not installed."""
        try:
            from cryptography.hazmat.primitives import hashes
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError as error:
            hint = "install evoke-proxy[encryption]"
            raise ConfigError(f"{_SETTING}: encrypting needs cryptography: {hint}") from error

        def cipher(salt: bytes) -> Any:
            return AESGCM(HKDF(hashes.SHA256(), 32, salt, b"evoke-proxy at rest").derive(key))

        self._cipher = cipher
        self.mark = int.from_bytes(hashlib.sha256(b"mark" + key).digest()[:3], "big") >> 1 | 1

    def close(self, data: bytes, about: bytes) -> bytes:
        salt = os.urandom(_SALT)
        sealed: bytes = self._cipher(salt).encrypt(_nonce(0, True), data, about)
        return salt + sealed

    def open(self, closed: bytes, about: bytes) -> bytes:
        salt, sealed = closed[:_SALT], closed[_SALT:]
        data: bytes = self._opened(self._cipher(salt), sealed, 0, True, about)
        return data

    def size(self, n_bytes: int) -> int:
        """How long a file of so many bytes gets."""
        return len(_MAGIC) + _SALT + n_bytes + _TAG * max(1, -(-n_bytes // _PIECE))

    def write(self, source: str, target: str, about: bytes) -> bool:
        """Encrypt a file into another, for its owner alone; on disk when it returns."""
        salt = os.urandom(_SALT)
        cipher = self._cipher(salt)
        with open(source, "rb") as plain, _created(target) as out:
            out.write(_MAGIC + salt)
            for number, (piece, last) in enumerate(_pieces(plain, _PIECE)):
                out.write(cipher.encrypt(_nonce(number, last), piece, about))
            out.flush()
            os.fsync(out.fileno())
        return True

    def read(self, source: str, target: str, about: bytes) -> bool:
        """Decrypt one; SnapshotUnusable when it is not what was written, all of it and no more."""
        with open(source, "rb") as sealed, _created(target) as out:
            if sealed.read(len(_MAGIC)) != _MAGIC:
                raise SnapshotUnusable("key", f"{Path(source).name} is not encrypted")
            cipher = self._cipher(sealed.read(_SALT))
            for number, (piece, last) in enumerate(_pieces(sealed, _PIECE + _TAG)):
                try:
                    out.write(self._opened(cipher, piece, number, last, about))
                except ValueError as error:
                    raise SnapshotUnusable("key", f"{Path(source).name}: {error}") from error
        return True

    @staticmethod
    def _opened(cipher: Any, sealed: bytes, number: int, last: bool, about: bytes) -> Any:
        from cryptography.exceptions import InvalidTag

        try:
            return cipher.decrypt(_nonce(number, last), sealed, about)
        except InvalidTag as error:
            raise ValueError("written with another key, or not what was written") from error


def _created(target: str) -> Any:
    path = Path(target)
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")


def _pieces(file: Any, n_bytes: int) -> Iterator[tuple[bytes, bool]]:
    """Pieces and whether each is the last; an empty file has an empty one."""
    piece = file.read(n_bytes)
    while True:
        following = file.read(n_bytes)
        yield piece, not following
        if not following:
            return
        piece = following


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])
