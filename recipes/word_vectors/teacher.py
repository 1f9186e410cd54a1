"""Encodes many texts with an encoder, in batches of texts of about the same length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

# Longer texts are cut; tokens in one batch, with padding.
MAX_TOKENS, _BATCH_TOKENS = 96, 4096

Matrix = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Lesson:
    """Texts as a student sees them, and what the teacher says of them.

    Attributes:
        pieces: The word pieces of each text, as ids, without marks.
        vectors: float32 [n, d], of unit length: the teacher's.
    """

    pieces: Sequence[Ids]
    vectors: Matrix


def lesson(
    directory: Path, texts: Sequence[str], threads: int, report: Callable[[float], None]
) -> Lesson:
    """Encode texts with the encoder in `directory`; `report` is told the share that is done."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        str(directory / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    tokenizer: Tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    ids: list[list[int]] = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
    vectors, done = np.zeros((len(ids), 0), np.float32), 0
    for batch in _batches([len(tokens) for tokens in ids]):
        longest = max(len(ids[i]) for i in batch)
        tokens = np.array([ids[i] + [0] * (longest - len(ids[i])) for i in batch], np.int64)
        mask = np.array([[k < len(ids[i]) for k in range(longest)] for i in batch], np.int64)
        feed = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": np.zeros_like(mask)}
        rows = session.run(["last_hidden_state"], feed)[0]
        means = (rows * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
        if not vectors.size:
            vectors = np.zeros((len(ids), means.shape[1]), np.float32)
        vectors[batch] = means / np.linalg.norm(means, axis=1, keepdims=True)
        done += len(batch)
        report(done / len(ids))
    return Lesson([np.array(tokens[1:-1], np.int64) for tokens in ids], vectors)


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the positions of texts of about the same length, shortest first."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[i] > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
