"""Data that travels with the package: the recall model, and word vectors with similar words.

Each has its card.
"""

from __future__ import annotations

from pathlib import Path


def bundled_model() -> Path:
    """Return the path of the GGUF file of the recall model, see MODEL_CARD.md."""
    return Path(__file__).with_name("tiny-recall-f16.gguf")


def word_vectors_file() -> Path:
    """Return the path of the table of word vectors, see WORD_VECTORS.md."""
    return Path(__file__).with_name("word-vectors.npz")


def similar_words_file() -> Path:
    """Return the path of the table of similar words, see WORD_VECTORS.md."""
    return Path(__file__).with_name("similar-words.npz")
