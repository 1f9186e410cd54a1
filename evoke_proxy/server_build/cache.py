"""The cache of sources, build trees and finished servers.

It is outside the checkout; its entries are named by hashes of their content. A finished server
appears by one rename, so it is found without the lock. Downloading, changing a tree and compiling
need the lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_POLL_SECONDS = 0.2


def cache_dir() -> Path:
    """Return $EVOKE_CACHE, else `evoke-proxy` in the user's cache directory; does not create it."""
    chosen = os.environ.get("EVOKE_CACHE")
    if chosen:
        return Path(chosen).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "evoke-proxy"


@contextmanager
def locked(cache: Path, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Lock the cache for one builder inside the `with` block.

    If another builder has the lock, calls `on_wait` once with the id of its process, and waits. The
    compilers inherit the open lock file: if a builder is killed, the next one waits until its
    compilers no longer write into the tree. (The locks of the package filelock are not inherited.)
    """
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "a+", encoding="utf-8") as file:
        _acquire(file.fileno(), lambda: on_wait(_owner(cache)))
        os.set_inheritable(file.fileno(), True)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _acquire(descriptor: int, on_wait: Callable[[], None]) -> None:
    waiting = False
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waiting:
                on_wait()
                waiting = True
            time.sleep(_POLL_SECONDS)


def _owner(cache: Path) -> str:
    return (cache / "lock").read_text(encoding="utf-8").strip() or "unknown"


def remove_drafts(cache: Path) -> None:
    """Delete the unfinished files of killed builders; the caller must hold the lock."""
    for pattern in ("*/.new-*", "trees/*/.overlay-*"):
        for draft in cache.glob(pattern):
            shutil.rmtree(draft, ignore_errors=True)


def finished_server(cache: Path, key: str) -> Path | None:
    """Return the executable of the finished server `key`; None when it is not in the cache."""
    server = cache / "bin" / key / "llama-server"
    stamp = server.with_name("stamp.json")
    return server if stamp.is_file() and os.access(server, os.X_OK) else None


def store_server(cache: Path, key: str, built: Path, stamp: Mapping[str, object]) -> Path:
    """Store a built server as `key` in one step, and return the path of its executable.

    `stamp` describes the build; it is written next to it as stamp.json.
    """
    servers = cache / "bin"
    servers.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=servers, prefix=".new-") as scratch:
        draft = Path(scratch) / key
        draft.mkdir()
        shutil.copy2(built, draft / "llama-server")
        (draft / "stamp.json").write_text(json.dumps(dict(stamp), indent=2) + "\n", "utf-8")
        final = servers / key
        shutil.rmtree(final, ignore_errors=True)  # an incomplete one
        os.rename(draft, final)
    return final / "llama-server"
