"""The built-in text encoder: a table of word vectors that is part of the package."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from evoke_proxy.core.retrieval.encoding import Vectors
from evoke_proxy.core.retrieval.word_vectors import WordVectors
from evoke_proxy.errors import ConfigError
from evoke_proxy.models import word_vectors_file


class WordVectorEncoder:
    """Embeds texts with a table of word vectors; needs no download and no further packages.

    Its methods may be called from several threads at a time. Questions and documents are embedded
    in the same way.

    Attributes:
        name: `built-in`.
        is_immediate: True, because a text takes microseconds.
        dimensions: The length d of its vectors.
        fingerprint: 32 bytes; different tables have different ones.
    """

    name = "built-in"
    is_immediate = True

    def __init__(self, path: Path | None = None) -> None:
        """Load the table at `path`, or that of the package; ConfigError when it cannot be read."""
        path = path or word_vectors_file()
        try:
            data = path.read_bytes()
            self.fingerprint = hashlib.blake2b(data, digest_size=32).digest()
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                pieces = file["pieces"].tobytes().decode("utf-8").split("\n")
                self._table = WordVectors(pieces, file["rows"], file["scales"])
        except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
            raise ConfigError(
                f"the built-in word vectors cannot be read: {path}: {error}; install evoke-proxy"
                " again, or set embedder.model to none"
            ) from error
        self.dimensions = self._table.dimensions

    def describe(self) -> str:
        """Describe the encoder in one line, for the log."""
        return f"built-in word vectors: {self.dimensions} dimensions, CPU"

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Return vectors of questions; see `documents`."""
        return self._table.vectors(texts)

    def documents(self, texts: Sequence[str]) -> Vectors:
        """Return vectors of texts: float32 [n, d], of unit length.

        The vector of a text without a word in the table is all zeros.
        """
        return self._table.vectors(texts)
