"""Finds the models that llama-server has downloaded from a model hub with its option `-hf`.

llama-server stores them like the hub's own clients (common/hf-cache.cpp and common/download.cpp of
llama.cpp): `models--OWNER--NAME/snapshots/COMMIT/FILE` links to `blobs/HASH`, which has the suffix
`.downloadInProgress` until it is complete. The links are made when all files are complete.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

# Variables that name the cache directory, the first one first, with the path below their value.
_DIRECTORIES = (
    ("LLAMA_CACHE", ""),
    ("HF_HUB_CACHE", ""),
    ("HUGGINGFACE_HUB_CACHE", ""),
    ("HF_HOME", "hub"),
    ("XDG_CACHE_HOME", "huggingface/hub"),
    ("HOME", ".cache/huggingface/hub"),
)
# Quantizations that llama-server prefers when the user names none, the best one first.
_PREFERRED = ("Q4_K_M", "Q8_0")
# Parts of the names of GGUF files that are no language models.
_COMPANIONS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_REPO = re.compile(r"[\w.-]{1,128}/[\w.-]{1,128}", re.ASCII)


def cached_model(repo: str, file: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the file that `llama-server -hf REPO` loads; None when it is not downloaded.

    Args:
        repo: `OWNER/NAME`, or `OWNER/NAME:QUANTIZATION`.
        file: The value of llama-server's `--hf-file`, if it is given.
        environ: The environment of llama-server, which names the directory of the cache.
    """
    name, _, quantization = repo.partition(":")
    folder = _folder(name, environ)
    commit = None if folder is None else _commit(folder / "refs")
    if folder is None or commit is None:
        return None
    snapshot = folder / "snapshots" / commit
    files = {path.relative_to(snapshot).as_posix(): path for path in sorted(snapshot.rglob("*"))}
    if file is not None:
        named = files.get(file)
        return named if named is not None and named.is_file() else None
    models = [path for name, path in files.items() if _is_model(name) and path.is_file()]
    for wanted in [quantization] if quantization else _PREFERRED:
        pattern = re.compile(re.escape(wanted) + "[.-]", re.IGNORECASE)
        for path in models:
            if pattern.search(path.relative_to(snapshot).as_posix()):
                return path
    return models[0] if models and not quantization else None


def downloading_bytes(repo: str, environ: Mapping[str, str]) -> int:
    """Return the bytes of the files of a model that are not complete yet."""
    folder = _folder(repo.partition(":")[0], environ)
    n_bytes = 0
    for path in () if folder is None else folder.glob("blobs/*.downloadInProgress"):
        with contextlib.suppress(OSError):  # it was completed meanwhile
            n_bytes += path.stat().st_size
    return n_bytes


def _folder(name: str, environ: Mapping[str, str]) -> Path | None:
    """The folder of a repository; None when its name is malformed."""
    if not _REPO.fullmatch(name):
        return None
    for variable, below in _DIRECTORIES:
        if environ.get(variable):
            base = Path(environ[variable]) / below
            return base / f"models--{name.replace('/', '--')}"
    return None


def _commit(refs: Path) -> str | None:
    """The commit of the branch `main`, else of another branch."""
    with contextlib.suppress(OSError):
        paths = sorted(refs.iterdir(), key=lambda path: (path.name != "main", path.name))
        for path in paths:
            words = path.read_text("ascii", "replace").split()
            if words and re.fullmatch("[0-9a-fA-F]{40}", words[0]):
                return words[0]
    return None


def _is_model(name: str) -> bool:
    base = name.rpartition("/")[2]
    if not base.endswith(".gguf") or _LATER_PART.search(base):
        return False
    return not any(part in base for part in _COMPANIONS)
