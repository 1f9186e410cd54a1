"""Opens regular files without blocking, and writes entries of directories to the disk."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, cast

_FLAGS = {
    "rb": os.O_RDONLY,
    "r+b": os.O_RDWR,
    "wb": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
}


def open_regular(path: Path, mode: str = "rb") -> BinaryIO:
    """Open a regular file in mode `rb`, `r+b` or `wb` (created with mode 0600).

    Raises OSError when it cannot be opened, or is not a regular file.
    """
    handle = os.open(path, _FLAGS[mode] | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return cast(BinaryIO, os.fdopen(handle, mode))


def sync_directory(directory: Path) -> None:
    """Write the entries of a directory to the disk, so that a renamed file survives a power loss.

    Blocks until they are written. Raises OSError when the directory cannot be opened.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
