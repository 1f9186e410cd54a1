"""Moves a session to another machine: its record, its vectors and its block files in one file.

The file is a tar archive that is encrypted and authenticated as a whole with a key (Tink's
streaming AEAD), so that only who has the key can read or make one. Its last entry lists size and
SHA-256 of the others. Nothing is used before all of it is verified.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path
from typing import Any, BinaryIO, cast

from evoke_proxy.adapters.block_files import (
    BLOCK_FILE,
    BlockFile,
    parse_head,
    read_head,
    read_own_head,
)
from evoke_proxy.adapters.cipher import EncryptedFormat
from evoke_proxy.adapters.snapshot_files import PART
from evoke_proxy.adapters.snapshot_index import Record
from evoke_proxy.core.prompt.layout import wire_name
from evoke_proxy.core.session.codec import SessionRecord, decode
from evoke_proxy.errors import ConfigError, SnapshotUnusable
from evoke_proxy.regular_files import open_regular, sync_directory

_AAD = b"evoke-proxy session 1"
_VERSION = 1
_MANIFEST = "manifest.json"
# Limits of an archive: entries, bytes of a record or of a part, and of a record when unpacked: that
# of a conversation with several million tokens.
_MAX_ENTRIES = 100_000
_MAX_RECORD_BYTES = 64 << 20
_MAX_UNPACKED_BYTES = 128 << 20
_MAX_MANIFEST_BYTES = 32 << 20
# Most bytes of all entries that are no blocks, and of one read of the archive: headers of tar files
# can have any size.
_MAX_TEXT_BYTES = 256 << 20
_MAX_READ_BYTES = 64 << 20
_COPY_BYTES = 1 << 20
# Characters of the name of an entry in an error: names can have any length.
_NAME_CHARS = 100
# The folder in the block folder where files are written before they are verified. A later import
# deletes those that are left, so no other program may use names like this.
_INCOMING = ".evoke-import-"


@dataclass(frozen=True, slots=True)
class Origin:
    """What a session belongs to.

    Attributes:
        session: Its id.
        tenant: Its tenant.
        model: Digest of the model and of the size of its rows, see `cli.sessions`.
    """

    session: str
    tenant: str
    model: str


@dataclass(frozen=True, slots=True)
class Imported:
    """What an archive had.

    Attributes:
        origin: The session.
        records: Its record and the parts of it.
        n_blocks: Number of its block files.
        n_existing: Number of those that the folder has already; these were left as they are.
        name: A name in one of the new files; "" without new files.
    """

    origin: Origin
    records: Sequence[Record]
    n_blocks: int
    n_existing: int
    name: str


@dataclass(frozen=True, slots=True)
class SessionArchives:
    """Writes and reads archives, which never exist unencrypted.

    Attributes:
        blocks: The folder of llama-server's disk tier.
        format: Encrypts the archive.
    """

    blocks: Path
    format: EncryptedFormat

    def write(
        self, target: Path, origin: Origin, records: Sequence[Record], blocks: Sequence[BlockFile]
    ) -> None:
        """Write the archive of a session to `target`, readable only by its owner.

        Raises OSError or SnapshotUnusable when a file cannot be read or written, and then leaves
        `target` as it was.
        """
        sealed = target.with_name(f"{target.name}{PART}")
        try:
            with self.format.encrypting(str(sealed), _AAD) as out:
                _pack(out, origin, records, blocks)
            sealed.replace(target)
            sync_directory(target.parent)
        finally:
            sealed.unlink(missing_ok=True)

    def read(self, source: Path, model: str, present: Collection[str]) -> Imported:
        """Read an archive, and move its block files to the folder when all of it is verified.

        `model` is the digest of the model here, `present` are the sessions that exist here. Raises
        ConfigError when the archive is damaged, too large, of another key or model, or of a session
        that exists, and then adds nothing.
        """
        self._check_space(source)
        for left in self.blocks.glob(f"{_INCOMING}*"):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
        try:
            with tempfile.TemporaryDirectory(prefix=_INCOMING, dir=self.blocks) as name:
                with self.format.decrypting(str(source), _AAD) as plain:
                    origin, records = _unpack(plain, Path(name), model)
                    while plain.read(_COPY_BYTES):  # its end is authenticated, too
                        pass
                if origin.session in present:
                    raise ValueError(f"session {origin.session} exists here; delete it first")
                incoming = sorted(Path(name).iterdir())
                names = [_own_name(path, origin) for path in incoming]
                new = [self._publish(path) for path in incoming]
                sync_directory(self.blocks)
            name = next(compress(names, new), "")
            return Imported(origin, records, len(new), len(new) - sum(new), name)
        except SnapshotUnusable as error:
            raise ConfigError(f"{source} cannot be decrypted: {error}") from error
        except (ValueError, tarfile.TarError) as error:
            raise ConfigError(f"{source} is not imported: {error}") from error

    def _check_space(self, source: Path) -> None:
        """Raise ConfigError when the block files of an archive do not fit the disk."""
        needed, free = source.stat().st_size, shutil.disk_usage(self.blocks).free
        if needed > free:
            raise ConfigError(
                f"{self.blocks} has not enough free space for {source}: the import needs {needed}"
                f" bytes there, {free} are free"
            )

    def _publish(self, path: Path) -> bool:
        """Give a verified file its name; False when another file has it."""
        try:
            os.link(path, self.blocks / path.name)
        except FileExistsError:
            return False
        return True


def _pack(
    out: BinaryIO, origin: Origin, records: Sequence[Record], blocks: Sequence[BlockFile]
) -> None:
    entries: list[dict[str, Any]] = []

    def add(name: str, content: _Hashed, **about: Any) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode = content.n_bytes, 0o600
        archive.addfile(info, content)
        entries.append(
            {"name": name, "n_bytes": info.size, "sha256": content.sum.hexdigest()} | about
        )

    with tarfile.open(fileobj=out, mode="w|", format=tarfile.USTAR_FORMAT) as archive:
        if len(records) + len(blocks) >= _MAX_ENTRIES:
            raise ConfigError(f"the session has {_MAX_ENTRIES} records and blocks or more")
        if any(len(record.packed) > _MAX_RECORD_BYTES for record in records):
            raise ConfigError(f"a record of the session has more than {_MAX_RECORD_BYTES} bytes")
        for number, record in enumerate(records):
            add(f"record-{number}", _Hashed(record.packed), id=record.id)
        for block in blocks:
            with open_regular(block.path) as file:
                try:
                    head, start = read_own_head(file, origin.session)
                except ValueError as error:
                    raise ConfigError(f"{block.path} is damaged, delete it: {error}") from error
                n_bytes = len(head) + os.fstat(file.fileno()).st_size - start
                file.seek(start)
                add(block.path.name, _Hashed(head, file, n_bytes))
        manifest = {"version": _VERSION, **asdict(origin), "entries": entries}
        add(_MANIFEST, _Hashed(json.dumps(manifest).encode()))


def _unpack(file: BinaryIO, folder: Path, model: str) -> tuple[Origin, Sequence[Record]]:
    """Read an archive; its block files are written to `folder`.

    Raises ValueError or TarError unless all of it is as it was written, for this model.
    """
    try:
        found, texts = _entries(file, folder)
        if _MANIFEST not in texts:
            raise ValueError("the list of its entries is missing")
        manifest = json.loads(texts.pop(_MANIFEST))
    except RecursionError as error:  # of the parsers of JSON and of the headers of an entry
        raise ValueError("its headers or the list of its entries are nested too deeply") from error
    del found[_MANIFEST]
    return _verified(manifest, found, texts, model)


def _entries(file: BinaryIO, folder: Path) -> tuple[dict[str, tuple[int, str]], dict[str, bytes]]:
    """Return size and SHA-256 of each entry, and the contents of those that are no blocks.

    Raises ValueError or TarError for entries that an archive never has, and RecursionError.
    """
    found: dict[str, tuple[int, str]] = {}
    texts: dict[str, bytes] = {}
    n_text = 0
    with tarfile.open(fileobj=cast(BinaryIO, _Forward(file)), mode="r:") as archive:
        for entry in archive:
            # A sparse entry has more bytes than the archive.
            is_plain = entry.type == tarfile.REGTYPE and not entry.issparse()
            content = archive.extractfile(entry) if is_plain else None
            if content is None or entry.name in found or len(found) >= _MAX_ENTRIES:
                raise ValueError(f"the entry {entry.name[:_NAME_CHARS]!r} is not expected")
            limit = _MAX_MANIFEST_BYTES if entry.name == _MANIFEST else _MAX_RECORD_BYTES
            if BLOCK_FILE.fullmatch(entry.name):
                found[entry.name] = entry.size, _copied(content, folder / entry.name)
                continue
            if entry.size > limit:
                raise ValueError(f"{entry.name} has more than {limit} bytes")
            n_text += entry.size
            if n_text > _MAX_TEXT_BYTES:
                raise ValueError(f"its records have more than {_MAX_TEXT_BYTES} bytes")
            texts[entry.name] = data = content.read()
            found[entry.name] = len(data), hashlib.sha256(data).hexdigest()
    return found, texts


def _verified(
    manifest: Mapping[str, Any],
    found: Mapping[str, tuple[int, str]],
    texts: Mapping[str, bytes],
    model: str,
) -> tuple[Origin, Sequence[Record]]:
    """Compare the entries `found` with the manifest; returns the session and its records."""
    if not isinstance(manifest, dict) or manifest.get("version") != _VERSION:
        raise ValueError(f"its version is not {_VERSION}; use the same version of evoke-proxy")
    try:
        origin = Origin(*(str(manifest[name]) for name in ("session", "tenant", "model")))
        listed = {it["name"]: (it["n_bytes"], it["sha256"]) for it in manifest["entries"]}
        ids = {it["name"]: str(it["id"]) for it in manifest["entries"] if "id" in it}
    except (LookupError, TypeError) as error:
        raise ValueError(f"the list of its entries is damaged: {error!r}") from error
    if listed != found or texts.keys() != ids.keys():
        raise ValueError("its entries are not those that were written")
    if origin.model != model:
        raise ValueError("it is of another model, or of other types of keys and values")
    records = [Record(ids[name], origin.tenant, 0.0, data) for name, data in texts.items()]
    if any(record.session != origin.session for record in records):
        raise ValueError("it has the record of another session")
    own = [record for record in records if not record.is_part]
    state = unpacked(own[0]).session if len(own) == 1 else None
    if state is None or state.id != origin.session:
        raise ValueError("the record of its session is missing")
    if state.tenant != origin.tenant:
        raise ValueError("the record is of another tenant")
    labels = state.layout.usable_copies.union(
        state.layout.unused_copies, state.layout.blocks.labels
    )
    if not all(label.startswith(f"{wire_name(state.id)}/") for label in labels):
        raise ValueError("the record names blocks of another session")
    return origin, records


def _own_name(path: Path, origin: Origin) -> str:
    """Leave only the names of a session in a verified block file, and return one of them.

    ValueError for a block of another tenant or without a name of the session.
    """
    with open_regular(path) as file:
        head, start = read_own_head(file, origin.session)
        tenant, names = parse_head(head)
        if tenant != origin.tenant or not names:
            raise ValueError(f"{path.name} is a block of another tenant or session")
        file.seek(0)
        if file.read(start) != head:
            changed = path.with_suffix(".new")
            with open_regular(changed, "wb") as out:
                out.write(head)
                shutil.copyfileobj(file, out, _COPY_BYTES)
                out.flush()
                os.fsync(out.fileno())
            changed.replace(path)
    return next(iter(names))


def unpacked(record: Record) -> SessionRecord:
    """Decode a record of at most 128 MiB when unpacked; ValueError for other data."""
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(record.packed, _MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if reader.unconsumed_tail:
        raise ValueError(f"a record has more than {_MAX_UNPACKED_BYTES} bytes")
    return decode(data)


class _Forward(io.RawIOBase):
    """A stream that is only read forwards; ValueError for a read of too many bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._at = file, 0

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_READ_BYTES:
            raise ValueError(f"a header has more than {_MAX_READ_BYTES} bytes")
        data = self._file.read(size)
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET or offset < self._at:
            raise ValueError("an entry refers to an earlier one")
        while self.read(min(offset - self._at, _COPY_BYTES)):
            pass
        return self._at

    def tell(self) -> int:
        return self._at


class _Hashed(io.RawIOBase):
    """Bytes and what follows in a file, hashed while they are read.

    Attributes:
        n_bytes: Size of both.
        sum: SHA-256 of what was read.
    """

    def __init__(
        self, data: bytes, file: BinaryIO | None = None, n_bytes: int | None = None
    ) -> None:
        self._parts = [io.BytesIO(data), *([file] if file is not None else [])]
        self.n_bytes = len(data) if n_bytes is None else n_bytes
        self.sum = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = b""
        for part in self._parts:
            data += part.read(size - len(data) if size >= 0 else -1)
        self.sum.update(data)
        return data


def _copied(content: Any, target: Path) -> str:
    """Write an entry to a new file, flush it to disk, and return its SHA-256."""
    digest = hashlib.sha256()
    with open_regular(target, "wb") as out:
        while piece := content.read(_COPY_BYTES):
            digest.update(piece)
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
    read_head(target)
    return digest.hexdigest()
