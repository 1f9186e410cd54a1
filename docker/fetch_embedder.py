"""Downloads the embedder, bge-small-en-v1.5 as ONNX, into a directory.

    python3 fetch_embedder.py DIRECTORY

Revision and hashes are pinned. A correct file is not downloaded again; one with another hash is not
stored. Uses the standard library only. Exit codes: 0 all files are present, 1 one is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import urllib.request
from pathlib import Path

REPOSITORY = "BAAI/bge-small-en-v1.5"
REVISION = "5c38ec7c405ec4b44b94cc5a9bb96e735b38267a"
# SHA-256 by path in the repository, as other projects pin them for this revision.
SHA256 = {
    "onnx/model.onnx": "828e1496d7fabb79cfa4dcd84fa38625c0d3d21da474a00f08db0f559940cf35",
    "tokenizer.json": "d241a60d5e8f04cc1b2b3e9ef7a4921b27bf526d9f6050ab90f9267a1f9e5c66",
    "config.json": "094f8e891b932f2000c92cfc663bac4c62069f5d8af5b5278c4306aef3084750",
}
_CHUNK = 1 << 20
_TIMEOUT_S = 60


class FetchError(Exception):
    """A file cannot be downloaded, or has another hash."""


def fetch(url: str, sha256: str, target: Path) -> bool:
    """Download `url` to `target`; False when it exists. FetchError when the hash differs."""
    if target.is_file() and _sha256(target) == sha256:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as scratch:
        draft = Path(scratch) / target.name
        _download(url, draft)
        actual = _sha256(draft)
        if actual != sha256:
            raise FetchError(f"{url} has sha256 {actual}, expected {sha256}")
        draft.replace(target)
    return True


def _download(url: str, draft: Path) -> None:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply, draft.open("wb") as file:
            while chunk := reply.read(_CHUNK):
                file.write(chunk)
    except OSError as error:
        raise FetchError(f"{url}: {error}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Download every pinned file; returns the exit code."""
    parser = argparse.ArgumentParser(description="Download bge-small-en-v1.5 as ONNX.")
    parser.add_argument("directory", type=Path, help="directory for model.onnx and tokenizer.json")
    parser.add_argument("--hub", default="https://huggingface.co", help="a mirror of the model hub")
    arguments = parser.parse_args(argv)
    for path, sha256 in SHA256.items():
        target = arguments.directory / Path(path).name
        url = f"{arguments.hub}/{REPOSITORY}/resolve/{REVISION}/{path}"
        try:
            downloaded = fetch(url, sha256, target)
        except FetchError as error:
            print(f"fetch_embedder: {error}", file=sys.stderr)
            return 1
        print(f"{target}: {'downloaded' if downloaded else 'exists'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
