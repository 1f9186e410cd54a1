"""Makes a vector of each word piece by itself: where the training of the table begins.

A static embedding as model2vec makes it (Minish Lab, 2024): each token of all-MiniLM-L6-v2 passes
through the encoder by itself, the mean of all tokens is removed, and 256 principal components stay.
The components are whitened (Su and others, "Whitening Sentence Representations", 2021), and each
token is weighted by a / (a + p), where p is its probability by Zipf's law (Arora and others, "A
Simple but Tough-to-Beat Baseline for Sentence Embeddings", 2017). The vocabulary is ordered by
frequency from the first word on, so a token's place is its rank.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

DIMENSIONS = 256
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


def whitened(rows: Matrix, dimensions: int) -> Matrix:
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


def starting_rows(directory: Path, tokens: Sequence[int], threads: int = 1) -> Matrix:
    """The vector [n, 256] of each token of an encoder before training."""
    rows = whitened(encoded(directory, tokens, threads), DIMENSIONS)
    return np.asarray(rows * rarity_weights(tokens, vocabulary(directory))[:, None])
