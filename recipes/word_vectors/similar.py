"""Makes the table of similar words from the table of word vectors.

Two words are similar when the cosine of their vectors is at least 0.35. Only words of one piece, of
three letters and more, are compared; function words are left out, and so are other forms of a word.
It takes a few seconds. Run it after `recipes.word_vectors.train`.
"""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evoke_proxy.core.retrieval.bm25 import FUNCTION_STEMS
from evoke_proxy.core.retrieval.stemming import stem
from evoke_proxy.models import similar_words_file, word_vectors_file
from recipes import command

_EXAMPLES = """examples:
  python -m recipes.word_vectors.similar
  python -m recipes.word_vectors.similar out/similar.npz --table out/word-vectors.npz"""
MIN_SIMILARITY = 0.35
# Of more the most similar ones are kept, because a count is stored as a byte; no word of the
# package has as many.
MAX_SIMILAR = 255
_MIN_CHARS, _MOST_WORDS = 3, 1 << 16
_ROWS_AT_ONCE = 512


def is_compared(piece: str) -> bool:
    """Return whether a word piece is a word that is compared with others."""
    is_word = len(piece) >= _MIN_CHARS and piece.isascii() and piece.isalpha()
    return is_word and stem(piece) not in FUNCTION_STEMS


def tables(words: Sequence[str], vectors: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of `SimilarWordTable` for words with vectors [n, d].

    The words are UTF-8 lines. ValueError for more words than two bytes can number, and for none.
    """
    if not 0 < len(words) <= _MOST_WORDS:
        raise ValueError(f"{len(words)} words; a table has 1 to {_MOST_WORDS}")
    pairs = list(_pairs(np.array([stem(word) for word in words]), vectors))
    similarities = np.concatenate([found for _, found in pairs])
    return {
        "words": np.frombuffer("\n".join(words).encode("utf-8"), np.uint8),
        "counts": np.array([len(others) for others, _ in pairs], np.uint8),
        "others": np.concatenate([others for others, _ in pairs]),
        "similarities": np.rint(similarities.clip(max=1.0) * 255).astype(np.uint8),
    }


def _pairs(
    stems: npt.NDArray[np.str_], vectors: npt.NDArray[np.float32]
) -> Iterator[tuple[npt.NDArray[np.uint16], npt.NDArray[np.float32]]]:
    """Yield for each word the indexes of similar words, and their similarities, best first.

    `stems` are those of the words.
    """
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    for start in range(0, len(units), _ROWS_AT_ONCE):
        for i, cosines in enumerate(units[start : start + _ROWS_AT_ONCE] @ units.T, start):
            found = np.flatnonzero((cosines >= MIN_SIMILARITY) & (stems != stems[i]))
            found = found[np.argsort(-cosines[found], kind="stable")][:MAX_SIMILAR]
            yield found.astype(np.uint16), cosines[found]


def made_from(table: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of the table of similar words for a file of word vectors."""
    with np.load(table) as file:
        pieces = file["pieces"].tobytes().decode("utf-8").split("\n")
        kept = [i for i, piece in enumerate(pieces) if is_compared(piece)]
        vectors = file["rows"][kept].astype(np.float32) * file["scales"][kept, np.newaxis]
    return tables([pieces[i] for i in kept], vectors)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the table; returns the exit code."""
    parser = command("word_vectors.similar", __doc__, _EXAMPLES)
    parser.add_argument("file", type=Path, nargs="?", help="default: the package's")
    parser.add_argument(
        "--table", type=Path, default=word_vectors_file(), help="default: the package's"
    )
    args = parser.parse_args(argv)
    file: Path = args.file or similar_words_file()
    if not args.table.is_file():
        print(f"word_vectors: {args.table} does not exist", file=sys.stderr)
        return 1
    arrays, data = made_from(args.table), io.BytesIO()
    np.savez_compressed(data, allow_pickle=False, **arrays)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_bytes(data.getvalue())
    part.replace(file)
    digest = hashlib.sha256(data.getvalue()).hexdigest()
    print(
        f"{file}: {len(arrays['counts'])} words, {len(arrays['others'])} pairs,"
        f" {file.stat().st_size} bytes, sha256 {digest}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
