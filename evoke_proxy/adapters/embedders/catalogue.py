"""Lists the text encoders that `evoke-proxy embedder fetch` offers, and manages fetched ones.

Each file is pinned by its SHA-256. An encoder appears in the directory of fetched encoders only
when all of its files are complete.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

HUB = "https://huggingface.co"


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file of an encoder.

    Attributes:
        path: Its path in the repository, and in the directory of the stored encoder.
        size: Its size in bytes.
        sha256: Its SHA-256, in hexadecimal.
    """

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PinnedEncoder:
    """An encoder at one revision of its repository.

    Attributes:
        name: Its name on the command line and in settings.
        repository: Its repository on the model hub.
        revision: The commit of the repository.
        licence: Its licence, as an SPDX identifier.
        files: The files of the repository that the proxy reads.
    """

    name: str
    repository: str
    revision: str
    licence: str
    files: tuple[PinnedFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


# The encoders on offer, the preferred one first.
ENCODERS = (
    PinnedEncoder(
        name="bge-small-en-v1.5",
        repository="BAAI/bge-small-en-v1.5",
        revision="5c38ec7c405ec4b44b94cc5a9bb96e735b38267a",
        licence="MIT",
        files=(
            PinnedFile(
                "config.json",
                743,
                "094f8e891b932f2000c92cfc663bac4c62069f5d8af5b5278c4306aef3084750",
            ),
            PinnedFile(
                "tokenizer.json",
                711_396,
                "d241a60d5e8f04cc1b2b3e9ef7a4921b27bf526d9f6050ab90f9267a1f9e5c66",
            ),
            PinnedFile(
                "onnx/model.onnx",
                133_093_490,
                "828e1496d7fabb79cfa4dcd84fa38625c0d3d21da474a00f08db0f559940cf35",
            ),
        ),
    ),
    PinnedEncoder(
        name="all-MiniLM-L6-v2",
        repository="sentence-transformers/all-MiniLM-L6-v2",
        revision="1110a243fdf4706b3f48f1d95db1a4f5529b4d41",
        licence="Apache-2.0",
        files=(
            PinnedFile(
                "1_Pooling/config.json",
                190,
                "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            ),
            PinnedFile(
                "sentence_bert_config.json",
                53,
                "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            ),
            PinnedFile(
                "tokenizer.json",
                466_247,
                "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            ),
            PinnedFile(
                "onnx/model.onnx",
                90_405_214,
                "6fd5d72fe4589f189f8ebc006442dbb529bb7ce38f8082112682524616046452",
            ),
        ),
    ),
)
DEFAULT = ENCODERS[0].name


def encoder_names() -> tuple[str, ...]:
    """The names of all encoders, the preferred one first."""
    return tuple(encoder.name for encoder in ENCODERS)


def encoder_named(name: str) -> PinnedEncoder:
    """Return the encoder with a name; KeyError when there is none."""
    match = next((encoder for encoder in ENCODERS if encoder.name == name), None)
    if match is None:
        raise KeyError(name)
    return match


def default_directory() -> Path:
    """Return `evoke-proxy/embedders` in the data directory of the user; does not create it.

    For a user without a home directory it is /var/lib/evoke-proxy/embedders.
    """
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    try:
        return Path(base).expanduser() / "evoke-proxy" / "embedders"
    except RuntimeError:  # a user without a home directory
        return Path("/var/lib/evoke-proxy/embedders")


class EncoderStore:
    """The fetched encoders in a directory, which may not exist yet.

    Attributes:
        root: The directory.
    """

    def __init__(self, directory: str | Path = "") -> None:
        """Use a directory, or `default_directory` if `directory` is empty."""
        self.root = Path(directory).expanduser() if directory else default_directory()

    def directory(self, encoder: PinnedEncoder) -> Path:
        """Return the directory of an encoder, which exists if it is fetched."""
        return self.root / encoder.name

    def draft(self, encoder: PinnedEncoder) -> Path:
        """Return the directory for the files of an encoder until it is completely fetched."""
        return self.root / f".{encoder.name}.part"

    def has(self, encoder: PinnedEncoder) -> bool:
        """Whether all files of an encoder exist with their sizes; does not compare hashes."""
        home = self.directory(encoder)
        try:
            return all((home / file.path).stat().st_size == file.size for file in encoder.files)
        except OSError:
            return False

    def stored(self) -> list[PinnedEncoder]:
        """Return the fetched encoders, the preferred one first."""
        return [encoder for encoder in ENCODERS if self.has(encoder)]

    def remove(self, encoder: PinnedEncoder) -> bool:
        """Delete an encoder and its unfinished files; False when there were none."""
        existed = False
        for path in (self.directory(encoder), self.draft(encoder)):
            if path.is_dir():
                shutil.rmtree(path)
                existed = True
        return existed
