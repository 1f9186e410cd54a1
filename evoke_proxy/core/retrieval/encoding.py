"""Reads how to run a text encoder, and pools its output to vectors of unit length.

The directory may contain files of sentence-transformers; the configuration overrides their prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from evoke_proxy.config import EmbedderConfig
from evoke_proxy.errors import ConfigError

Vectors = npt.NDArray[np.float32]
# For a word those of similar meaning, each with its similarity in (0, 1], the most similar first.
SimilarWords = Mapping[str, Sequence[tuple[str, float]]]
NO_SIMILAR_WORDS: SimilarWords = {}

POOLINGS = ("cls", "mean")
POOLING_FILE = "1_Pooling/config.json"
PROMPTS_FILE = "config_sentence_transformers.json"
MODULES_FILE = "modules.json"
# The key that limits the length of a text, by file.
LENGTHS = {
    "sentence_bert_config.json": "max_seq_length",
    "tokenizer_config.json": "model_max_length",
    "config.json": "max_position_embeddings",
}
FILES = (POOLING_FILE, PROMPTS_FILE, MODULES_FILE, *LENGTHS)

# From the model card of bge-small-en-v1.5; no file of its directory contains it. Most encoders that
# pool the first token and name no prompts belong to this family.
BGE_QUERY = "Represent this sentence for searching relevant passages: "
_MAX_TOKENS = 512
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


class Encoder(Protocol):
    """Makes vectors from texts; its methods may be called from several threads at a time.

    Attributes:
        name: What an operator calls it.
        is_immediate: Whether a text takes microseconds, so that no thread or cache is worth it.
        fingerprint: 32 bytes that differ between encoders whose vectors differ.
        similar_words: Words of similar meaning; empty when it has none.
        is_english: Whether it is for English only: questions in other languages get no vectors.
    """

    name: str
    is_immediate: bool
    is_english: bool
    fingerprint: bytes
    similar_words: SimilarWords

    def describe(self) -> str:
        """The encoder in one line, for the log."""
        ...

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Unit vectors [n, d] of questions; EmbedderError when they cannot be made."""
        ...

    def documents(self, texts: Sequence[str]) -> Vectors:
        """Unit vectors [n, d] of the texts to search; EmbedderError when they cannot be made."""
        ...


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings that convert a text to a vector.

    Attributes:
        pooling: `cls` or `mean`.
        max_tokens: Maximum length of a text; longer texts are cut.
        query_instruction: Text before a query.
        document_instruction: Text before a document.
    """

    pooling: str
    max_tokens: int
    query_instruction: str
    document_instruction: str


def recipe(files: Mapping[str, Any], config: EmbedderConfig) -> Recipe:
    """Return the recipe of an encoder.

    `files` maps paths in its directory to parsed JSON; `config` overrides its prompts. ConfigError
    when the encoder needs a step that the proxy does not run, because its vectors would be wrong.
    """
    _check_modules(files.get(MODULES_FILE))
    pooling = _pooling(_mapping(files, POOLING_FILE))
    prompts = _prompts(_mapping(files, PROMPTS_FILE).get("prompts"))
    query, document = config.query_instruction, config.document_instruction
    if query is None:
        query = prompts.get("query") or (BGE_QUERY if pooling == "cls" and not prompts else "")
    if document is None:
        document = next((prompts[name] for name in _DOCUMENT_PROMPTS if name in prompts), "")
    return Recipe(pooling, _max_tokens(files), query, document)


def pooled(rows: npt.NDArray[Any], mask: npt.NDArray[Any], pooling: str) -> Vectors:
    """Return the unit vectors [n, d] of n texts from the rows [n, t, d] of their tokens.

    `mask` [n, t] is 1 for a token, 0 for padding on the right. `cls` takes the row of the first
    token, `mean` the mean over tokens. Rows [n, d] are pooled already and only scaled.
    """
    rows = rows.astype(np.float32, copy=False)
    if rows.ndim == 3 and pooling == "cls":
        rows = rows[:, 0]
    elif rows.ndim == 3:
        weight = mask.astype(np.float32)
        rows = np.einsum("ntd,nt->nd", rows, weight) / np.maximum(weight.sum(1, keepdims=True), 1)
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: Vectors = (rows / np.maximum(length, 1e-12)).astype(np.float32, copy=False)
    return unit


def _mapping(files: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = files.get(name)
    return found if isinstance(found, dict) else {}


def _check_modules(modules: object) -> None:
    for module in modules if isinstance(modules, list) else []:
        kind = str(module.get("type")) if isinstance(module, dict) else ""
        if kind.rsplit(".", 1)[-1] not in ("Transformer", "Pooling", "Normalize"):
            raise ConfigError(
                f"embedder.directory: {MODULES_FILE} needs {kind} after the encoder, which the"
                " proxy does not run; use an encoder without it"
            )


def _pooling(file: Mapping[str, Any]) -> str:
    """Return the pooling of a file in the old form (flags) or the new form (a name)."""
    flags = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
    named = file.get("pooling_mode")
    wanted = {str(name) for name in (named if isinstance(named, list) else [named]) if name}
    wanted |= {
        flags.get(key, key.removeprefix("pooling_mode_"))
        for key, value in file.items()
        if key.startswith("pooling_mode_") and value is True
    }
    if not wanted <= set(POOLINGS) or len(wanted) > 1:
        raise ConfigError(
            f"embedder.directory: {POOLING_FILE} needs pooling {' and '.join(sorted(wanted))};"
            f" the proxy has {' or '.join(POOLINGS)}"
        )
    return next(iter(wanted), "cls")


def _prompts(found: object) -> dict[str, str]:
    """Return prompts by name, without empty ones, which the library writes for every model."""
    pairs = found.items() if isinstance(found, dict) else ()
    return {str(name): text for name, text in pairs if isinstance(text, str) and text}


def _max_tokens(files: Mapping[str, Any]) -> int:
    found = [_mapping(files, name).get(key) for name, key in LENGTHS.items()]
    # Some files have 1e30 for "unknown".
    return min((n for n in found if isinstance(n, int) and 0 < n < 1 << 20), default=_MAX_TOKENS)
