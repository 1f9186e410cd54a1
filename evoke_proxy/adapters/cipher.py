"""Encrypts snapshots and records on disk, in the formats of Tink.

Rows are AES-256-GCM, files are Tink's streaming AEAD AES256-GCM-HKDF, both with associated data:
https://developers.google.com/tink/wire-format. The keys are derived from the configured one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path
from typing import Any, BinaryIO

from evoke_proxy.core.snapshots.disk_format import DiskFormat
from evoke_proxy.errors import ConfigError, SnapshotUnusable

# Bytes that are encrypted in one step, which holds the interpreter's lock.
_SEGMENT_BYTES = 256 * 1024
_KEY_BYTES = 32
_SETTING = "snapshots.key_file"
_TYPE_URL = "type.googleapis.com/google.crypto.tink."


class EncryptedFormat(DiskFormat):
    """Encrypts with a key of 256 bits."""

    def __init__(self, key: bytes) -> None:
        """Raise ConfigError when Tink is not installed."""
        try:
            import tink
        except ImportError as error:
            hint = "install evoke-proxy[encryption]"
            raise ConfigError(f"{_SETTING}: encryption needs tink: {hint}") from error
        self._error: type[Exception] = tink.TinkError
        self._rows = _row_primitive(_derived(key, b"rows"))
        self._files = _file_primitive(_derived(key, b"files"))
        self.key_id = _key_id(_derived(key, b"key id"))
        self.former_key_id = _key_id(hashlib.sha256(b"mark" + key).digest())

    def encode_row(self, data: bytes, aad: bytes) -> bytes:
        """Return the encrypted row."""
        encrypted: bytes = self._rows.encrypt(data, aad)
        return encrypted

    def decode_row(self, stored: bytes, aad: bytes) -> bytes:
        """Return the data of a row; ValueError when the row, the key or `aad` are not the same."""
        try:
            data: bytes = self._rows.decrypt(stored, aad)
        except self._error as error:
            raise ValueError("written with another key, or not what was written") from error
        return data

    def encode_file(self, source: str, target: str, aad: bytes) -> bool:
        """Encrypt a file into another, readable by its owner alone, and flush it to disk.

        Raises SnapshotUnusable or OSError when the disk does not take it.
        """
        with open(source, "rb") as plain, _created(target) as out:
            try:
                with self._files.new_encrypting_stream(out, aad) as stream:
                    while piece := plain.read(_SEGMENT_BYTES):
                        stream.write(piece)
            except self._error as error:  # Tink turns an OSError of `out` into an error of its own
                reason = str(error).partition("\n")[0]
                raise SnapshotUnusable("disk", f"{Path(source).name}: {reason}") from error
        with open(target, "rb") as file:
            os.fsync(file.fileno())
        return True

    def decode_file(self, source: str, target: str, aad: bytes) -> bool:
        """Decrypt a file into another; SnapshotUnusable unless it is complete and unchanged."""
        with open(source, "rb") as stored, _created(target) as out:
            try:
                with self._files.new_decrypting_stream(stored, aad) as stream:
                    while piece := stream.read(_SEGMENT_BYTES):
                        out.write(piece)
            except self._error as error:
                reason = "written with another key, or not what was written"
                raise SnapshotUnusable("key", f"{Path(source).name}: {reason}") from error
        return True


def _derived(key: bytes, purpose: bytes) -> bytes:
    """Derive a separate key for each purpose."""
    return hmac.digest(key, b"evoke-proxy " + purpose, "sha256")


def _key_id(digest: bytes) -> int:
    """23 bits, never 0, which is the id of no key."""
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
    """A keyset of one key, whose ciphertexts have no prefix that names it."""
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
