"""Opens regular files without blocking; a pipe or socket at the path is an error."""

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
