"""Encrypts snapshots and records on disk, in the formats of Tink.

Rows of the index are encrypted with AES-256-GCM, files with Tink's streaming AEAD AES256-GCM-HKDF,
both with associated data: https://developers.google.com/tink/wire-format. A separate key for each
of them is derived from the configured key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from evoke_proxy.core.snapshots.disk_format import DiskFormat
from evoke_proxy.errors import ConfigError, SnapshotUnusable, pip_install

# Bytes that are encrypted in one step, which holds the interpreter's lock.
_SEGMENT_BYTES = 256 * 1024
_KEY_BYTES = 32
_TYPE_URL = "type.googleapis.com/google.crypto.tink."


class EncryptedFormat(DiskFormat):
    """Encrypts rows and files.

    Attributes:
        key_id: 23 bits that identify the key; stored in the index.
        former_key_id: What an earlier version stored for this key, whose format was another one.
    """

    def __init__(self, key: bytes) -> None:
        """Use a key of 32 bytes; raises ConfigError when Tink is not installed."""
        try:
            import tink
        except ImportError as error:
            hint = pip_install("encryption")
            raise ConfigError(f"encryption needs tink: {hint}") from error
        self._error: type[Exception] = tink.TinkError
        self._rows = _row_primitive(_derived(key, b"rows"))
        self._files = _file_primitive(_derived(key, b"files"))
        self.key_id = _key_id(_derived(key, b"key id"))
        self.former_key_id = _key_id(hashlib.sha256(b"mark" + key).digest())

    def encode_row(self, data: bytes, aad: bytes) -> bytes:
        """Return `data` encrypted; `aad` is authenticated with it, but not stored."""
        encrypted: bytes = self._rows.encrypt(data, aad)
        return encrypted

    def decode_row(self, stored: bytes, aad: bytes) -> bytes:
        """Return the data of an encrypted row.

        Raises ValueError when the row has changed, or was written with another key or `aad`.
        """
        try:
            data: bytes = self._rows.decrypt(stored, aad)
        except self._error as error:
            raise ValueError("it was written with another key, or has changed since") from error
        return data

    def encode_file(self, source: str, target: str, aad: bytes) -> bool:
        """Encrypt a file to `target`, see `encrypting`; returns True: `target` was written."""
        with open(source, "rb") as plain, self.encrypting(target, aad) as stream:
            while piece := plain.read(_SEGMENT_BYTES):
                stream.write(piece)
        return True

    def decode_file(self, source: str, target: str, aad: bytes) -> bool:
        """Decrypt a file to `target`, readable only by its owner; returns True.

        Raises SnapshotUnusable (`key`) when the file is incomplete or has changed, or was written
        with another key or `aad`.
        """
        with self.decrypting(source, aad) as stream, _created(target) as out:
            while piece := stream.read(_SEGMENT_BYTES):
                out.write(piece)
        return True

    @contextmanager
    def encrypting(self, target: str, aad: bytes) -> Iterator[BinaryIO]:
        """Yield a stream to write: `target` gets its content encrypted, and is flushed to disk.

        Only its owner can read `target`. The stream has no position. Raises SnapshotUnusable or
        OSError when it cannot be written, for example to a full disk.
        """
        with _created(target) as out:
            try:
                with self._files.new_encrypting_stream(out, aad) as stream:
                    yield stream
            except self._error as error:  # Tink turns an OSError of `out` into an error of its own
                reason = str(error).partition("\n")[0]
                raise SnapshotUnusable("disk", f"{Path(target).name}: {reason}") from error
        with open(target, "rb") as file:
            os.fsync(file.fileno())

    @contextmanager
    def decrypting(self, source: str, aad: bytes) -> Iterator[BinaryIO]:
        """Yield a stream to read the content of an encrypted file from.

        What is read is what was written, and its end is the end: reading raises SnapshotUnusable
        (`key`) when the file is incomplete or has changed, or was written with another key or
        `aad`. The stream has no position.
        """
        with open(source, "rb") as stored:
            try:
                with self._files.new_decrypting_stream(stored, aad) as stream:
                    yield stream
            except self._error as error:
                reason = "it was written with another key, or has changed since"
                raise SnapshotUnusable("key", f"{Path(source).name}: {reason}") from error


def _derived(key: bytes, purpose: bytes) -> bytes:
    """Derive a separate key for each purpose."""
    return hmac.digest(key, b"evoke-proxy " + purpose, "sha256")


def _key_id(digest: bytes) -> int:
    """Return 23 bits of a digest, never 0, which stands for no key."""
    return int.from_bytes(digest[:3], "big") >> 1 | 1


def _row_primitive(key: bytes) -> Any:
    from tink import aead
    from tink.proto import aes_gcm_pb2

    aead.register()
    value = aes_gcm_pb2.AesGcmKey(version=0, key_value=key)
    return _keyset(_TYPE_URL + "AesGcmKey", value).primitive(aead.Aead)


def _file_primitive(key: bytes) -> Any:
    from tink import streaming_aead
    from tink.proto import aes_gcm_hkdf_streaming_pb2, common_pb2

    streaming_aead.register()
    value = aes_gcm_hkdf_streaming_pb2.AesGcmHkdfStreamingKey(version=0, key_value=key)
    value.params.ciphertext_segment_size = _SEGMENT_BYTES
    value.params.derived_key_size = _KEY_BYTES
    value.params.hkdf_hash_type = common_pb2.SHA256
    return _keyset(_TYPE_URL + "AesGcmHkdfStreamingKey", value).primitive(
        streaming_aead.StreamingAead
    )


def _keyset(type_url: str, value: Any) -> Any:
    """Return a keyset with one key; its ciphertexts have no prefix with the id of the key (RAW)."""
    import tink
    from tink import secret_key_access
    from tink.proto import tink_pb2

    keyset = tink_pb2.Keyset(primary_key_id=1)
    entry = keyset.key.add()
    entry.key_id, entry.status = 1, tink_pb2.ENABLED
    entry.output_prefix_type = tink_pb2.RAW
    entry.key_data.type_url = type_url
    entry.key_data.value = value.SerializeToString()
    entry.key_data.key_material_type = tink_pb2.KeyData.SYMMETRIC
    return tink.proto_keyset_format.parse(keyset.SerializeToString(), secret_key_access.TOKEN)


def _created(target: str) -> BinaryIO:
    path = Path(target)
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")
