"""The built-in text encoder: a table of word vectors that is part of the package."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.retrieval.encoding import SimilarWords, Vectors
from evoke_proxy.core.retrieval.similar_words import SimilarWordTable
from evoke_proxy.core.retrieval.word_vectors import WordVectors
from evoke_proxy.errors import ConfigError
from evoke_proxy.models import similar_words_file, word_vectors_file

T = TypeVar("T")
# What reading a damaged archive of arrays may raise.
_DAMAGED = (EOFError, ValueError, KeyError, NotImplementedError, BadZipFile, zlib.error)


class WordVectorEncoder:
    """Embeds texts with a table of word vectors; needs no download and no further packages.

    Its methods may be called from several threads at a time. Questions and documents are embedded
    in the same way.

    Attributes:
        name: `built-in`.
        is_immediate: True, because a text takes microseconds.
        is_english: True, because other languages have few of its words.
        dimensions: The length d of its vectors.
        fingerprint: 32 bytes; different tables of vectors have different ones.
        similar_words: Words of similar meaning.
    """

    name = "built-in"
    is_immediate = True
    is_english = True

    def __init__(self, path: Path | None = None, similar: Path | None = None) -> None:
        """Load the vectors at `path` and the similar words at `similar`, or those of the package.

        ConfigError when they cannot be read.
        """
        self.fingerprint, self._table = _read(path or word_vectors_file(), _vectors_in)
        self.similar_words: SimilarWords = _read(similar or similar_words_file(), _similar_words_in)
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


def _read(path: Path, parse: Callable[[bytes], T]) -> T:
    """Parse a file of the package; ConfigError when it cannot be read."""
    try:
        return parse(path.read_bytes())
    except (*_DAMAGED, OSError) as error:
        raise ConfigError(
            f"the built-in word vectors cannot be read: {path}: {error}; install evoke-proxy"
            " again, or set embedder.model to none"
        ) from error


def _vectors_in(data: bytes) -> tuple[bytes, WordVectors]:
    """Return the fingerprint of a table of word vectors, and the table."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        table = WordVectors(_lines(file["pieces"]), file["rows"], file["scales"])
    return hashlib.blake2b(data, digest_size=32).digest(), table


def _similar_words_in(data: bytes) -> SimilarWordTable:
    """Return the table of similar words in a file."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        pairs = file["counts"], file["others"], file["similarities"]
        return SimilarWordTable(_lines(file["words"]), *pairs)


def _lines(text: npt.NDArray[np.uint8]) -> list[str]:
    """Return the lines of UTF-8."""
    return text.tobytes().decode("utf-8").split("\n")
