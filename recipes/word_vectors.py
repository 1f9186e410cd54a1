"""Makes the table of word vectors that the proxy embeds texts with by default.

    python -m recipes.word_vectors [FILE]

A static embedding as model2vec makes it (Minish Lab, 2024): each token of all-MiniLM-L6-v2 passes
through the encoder by itself, the mean of all tokens is removed, and 256 principal components stay.
The components are whitened (Su and others, "Whitening Sentence Representations", 2021), and each
token is weighted by a / (a + p), where p is its probability by Zipf's law (Arora and others, "A
Simple but Tough-to-Beat Baseline for Sentence Embeddings", 2017). The vocabulary is ordered by
frequency from the first word on, so a token's place is its rank. Each row is stored in int8.

The number of threads does not change a byte; another processor may change single numbers by one."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evoke_proxy.models import word_vectors_file
from recipes import command
from recipes.export_minilm import ExportError, ensure

DIMENSIONS = 256
LEVELS = 127
# The most frequent word of BERT's vocabulary; before it there are single characters.
_FIRST_WORD = "the"
# The usual constant of smooth inverse frequency.
_SMOOTHING = 1e-4
_BATCH = 512

Matrix = npt.NDArray[np.float64]


def vocabulary(directory: Path) -> list[str]:
    """The tokens of an encoder, by their ids."""
    ids: dict[str, int] = json.loads((directory / "tokenizer.json").read_bytes())["model"]["vocab"]
    return sorted(ids, key=lambda token: ids[token])


def is_word_piece(token: str) -> bool:
    """Whether a token stands for text: it is neither a mark such as [CLS] nor unused."""
    return not (len(token) > 2 and token.startswith("[") and token.endswith("]"))


def encoded(directory: Path, tokens: Sequence[int], threads: int = 1) -> Matrix:
    """The encoder's row [n, d] of each token between [CLS] and [SEP]."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        str(directory / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    names = vocabulary(directory)
    first, last = names.index("[CLS]"), names.index("[SEP]")
    parts = []
    for start in range(0, len(tokens), _BATCH):
        batch = tokens[start : start + _BATCH]
        ids = np.array([[first, token, last] for token in batch], np.int64)
        feed = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "token_type_ids": np.zeros_like(ids),
        }
        parts.append(session.run(["last_hidden_state"], feed)[0][:, 1].astype(np.float64))
    return np.concatenate(parts)


def whitened(rows: Matrix, dimensions: int = DIMENSIONS) -> Matrix:
    """The largest principal components of rows, each with variance 1; their signs are fixed."""
    centred = rows - rows.mean(axis=0)
    variances, axes = np.linalg.eigh(centred.T @ centred / len(rows))
    variances, axes = variances[::-1][:dimensions], axes[:, ::-1][:, :dimensions]
    largest = np.abs(axes).argmax(axis=0)
    axes = axes * np.sign(axes[largest, np.arange(axes.shape[1])])
    return np.asarray(centred @ axes / np.sqrt(variances))


def rarity_weights(tokens: Sequence[int], names: Sequence[str]) -> Matrix:
    """The weight of each token, from 0 to 1; single characters, which come first, have rank 1."""
    n_words = len(names) - names.index(_FIRST_WORD)
    ranks = np.maximum(np.array(tokens, np.float64) - names.index(_FIRST_WORD) + 1, 1)
    probabilities = 1 / (ranks * (1 / np.arange(1, n_words + 1)).sum())
    return np.asarray(_SMOOTHING / (_SMOOTHING + probabilities))


def quantised(rows: Matrix) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Rows as whole numbers of -127 to 127, and the scale of each row."""
    scales = np.abs(rows).max(axis=1).astype(np.float32) / np.float32(LEVELS)
    whole = np.rint(rows / np.maximum(scales, 1e-12)[:, None])
    return whole.clip(-LEVELS, LEVELS).astype(np.int8), scales


def make(directory: Path, threads: int = 1) -> dict[str, npt.NDArray[Any]]:
    """The arrays of the table: `pieces` as UTF-8 lines, `rows` [n, 256] and `scales` [n]."""
    names = vocabulary(directory)
    kept = [token for token, name in enumerate(names) if is_word_piece(name)]
    rows = whitened(encoded(directory, kept, threads))
    rows *= rarity_weights(kept, names)[:, None]
    whole, scales = quantised(rows)
    text = "\n".join(names[token] for token in kept).encode("utf-8")
    return {"pieces": np.frombuffer(text, np.uint8), "rows": whole, "scales": scales}


def main(argv: Sequence[str] | None = None) -> int:
    """Make the table; returns the exit code."""
    parser = command(
        "word_vectors", __doc__, "example:\n  python -m recipes.word_vectors out/word-vectors.npz"
    )
    parser.add_argument(
        "file", type=Path, nargs="?", default=word_vectors_file(), help="default: the package's"
    )
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    try:
        table = make(ensure(), args.threads)
    except ExportError as error:
        print(f"word_vectors: {error}", file=sys.stderr)
        return 1
    with args.file.open("wb") as file:
        np.savez(file, pieces=table["pieces"], rows=table["rows"], scales=table["scales"])
    data = args.file.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    print(f"{args.file}: {len(table['rows'])} pieces, {len(data)} bytes, sha256 {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
