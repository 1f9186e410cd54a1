"""Downloads a pinned text encoder into the store, and continues interrupted downloads."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from evoke_proxy.adapters.embedders.catalogue import HUB, EncoderStore, PinnedEncoder, PinnedFile
from evoke_proxy.errors import DownloadError
from evoke_proxy.regular_files import sync_directory

_CHUNK = 1 << 18
_TIMEOUT_S = 30.0
# Most attempts in a row that receive no new byte, and the seconds between them.
_MAX_ATTEMPTS = 3
_PAUSE_S = 1.0
# HTTP statuses after which another attempt may succeed.
_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})

_NETWORK_ERRORS = (
    urllib.error.URLError,
    TimeoutError,
    ConnectionError,
    ssl.SSLError,
    http.client.HTTPException,
)

# Called with the bytes that are stored so far, and the bytes of the whole encoder.
Progress = Callable[[int, int], None]


def fetch(
    encoder: PinnedEncoder, store: EncoderStore, mirror: str = HUB, progress: Progress | None = None
) -> bool:
    """Download an encoder into the store; returns False if it is there with the right hashes.

    `mirror` is the base URL of the model hub or of a copy of it. The hash of each file is checked,
    and its bytes are flushed to disk, before the directory of the encoder appears by one rename.
    Raises DownloadError with the cause and the fix. The next call continues an unfinished file; a
    file with a wrong hash is deleted.
    """
    if not mirror.startswith(("https://", "http://")):
        raise DownloadError(f"{mirror!r} is no URL of a mirror such as https://mirror.example.org")
    home, draft = store.directory(encoder), store.draft(encoder)
    try:
        store.root.mkdir(parents=True, exist_ok=True)
        with _locked(store.root / f".{encoder.name}.lock"):
            if home.is_dir():
                if not [file for file in encoder.files if not _is_right(home / file.path, file)]:
                    return False
                shutil.rmtree(draft, ignore_errors=True)
                home.rename(draft)
            draft.mkdir(exist_ok=True)
            _fetch_files(encoder, draft, mirror.rstrip("/"), progress or _silent)
            draft.rename(home)
            sync_directory(store.root)
    except OSError as error:
        raise DownloadError(
            f"{store.root}: {error.strerror or error}; free space, or name another directory in"
            " embedder.store"
        ) from error
    return True


def _fetch_files(encoder: PinnedEncoder, draft: Path, mirror: str, progress: Progress) -> None:
    lacking = [file for file in encoder.files if not _is_right(draft / file.path, file)]
    done = encoder.size - sum(file.size for file in lacking)
    _check_room(draft, sum(file.size - _size(_part(draft, file)) for file in lacking))
    for file in lacking:
        url = f"{mirror}/{encoder.repository}/resolve/{encoder.revision}/{file.path}"
        part = _part(draft, file)
        part.parent.mkdir(parents=True, exist_ok=True)
        report = partial(_report, progress, done, encoder.size)
        continues = _size(part) > 0
        checksum = _download(url, file, part, report)
        if checksum != file.sha256 and continues:  # bytes of an earlier call may be damaged
            checksum = _download(url, file, part, report)
        if checksum != file.sha256:
            raise DownloadError(
                f"{url} has sha256 {checksum}, expected {file.sha256}; nothing was stored. Fetch it"
                " again without --mirror, or from another one"
            )
        part.rename(draft / file.path)
        sync_directory(part.parent)
        done += file.size


def _silent(done: int, total: int) -> None:
    """Ignore the progress."""


def _report(progress: Progress, before: int, total: int, n: int) -> None:
    progress(before + n, total)


def _download(url: str, file: PinnedFile, part: Path, progress: Callable[[int], None]) -> str:
    """Download what is missing of a file to `part`, and return its SHA-256.

    Deletes a file whose hash is not the pinned one. Raises DownloadError when the server refuses,
    or after _MAX_ATTEMPTS attempts in a row without a new byte.
    """
    attempts = 0
    while (begin := _size(part)) != file.size:
        try:
            with part.open("ab") as output:
                _receive(url, file, output, progress)
                output.flush()
                os.fsync(output.fileno())
            cause = "the connection ended early"
        except urllib.error.HTTPError as error:
            cause = f"HTTP status {error.code}"
            error.close()
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                part.unlink()
                raise DownloadError(
                    f"{url} is shorter than {file.size} bytes; it was not stored"
                ) from None
            if error.code not in _TRANSIENT:
                raise DownloadError(
                    f"{url}: {cause}; the server does not give this file: name another copy of the"
                    " model hub with --mirror URL"
                ) from None
        except _NETWORK_ERRORS as error:
            cause = str(getattr(error, "reason", error)) or type(error).__name__
        attempts = attempts + 1 if _size(part) <= begin else 0
        if attempts == _MAX_ATTEMPTS:
            raise _unreachable(url, cause)
        if attempts:
            time.sleep(_PAUSE_S)
    checksum = _sha256(part)
    if checksum != file.sha256:
        part.unlink()
    return checksum


def _receive(url: str, file: PinnedFile, output: BinaryIO, progress: Callable[[int], None]) -> None:
    """Append the bytes of a reply; a server without ranges sends the file from its start."""
    size = output.tell()
    request = urllib.request.Request(url, headers={"User-Agent": "evoke-proxy"})
    if size > file.size:
        output.truncate(size := 0)
    if size:
        request.add_header("Range", f"bytes={size}-")
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
        if size and reply.status != http.HTTPStatus.PARTIAL_CONTENT:
            output.truncate(size := 0)
        # One byte more than expected shows that it is another file.
        while size <= file.size and (chunk := reply.read(min(_CHUNK, file.size + 1 - size))):
            output.write(chunk)
            size += len(chunk)
            progress(min(size, file.size))
    if size > file.size:
        output.flush()
        output.truncate(0)
        raise DownloadError(f"{url} is larger than {file.size} bytes; it was not stored")


def _unreachable(url: str, cause: str) -> DownloadError:
    return DownloadError(
        f"{url}: {cause}; check the network and HTTPS_PROXY, or name a copy of the model hub with"
        " --mirror URL. Run the command again to continue"
    )


def _check_room(directory: Path, wanted: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < wanted:
        raise DownloadError(
            f"{directory.parent}: {wanted >> 20} MiB are needed and {free >> 20} MiB are free; free"
            " space, or name another directory in embedder.store"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DownloadError(
                f"another process is fetching into {path.parent}; wait for it to end"
            ) from None
        yield


def _part(draft: Path, file: PinnedFile) -> Path:
    """Return the path of an unfinished file; the name contains the hash of the complete file."""
    path = draft / file.path
    return path.with_name(f"{path.name}.{file.sha256[:12]}")


def _is_right(path: Path, file: PinnedFile) -> bool:
    return _size(path) == file.size and _sha256(path) == file.sha256


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
