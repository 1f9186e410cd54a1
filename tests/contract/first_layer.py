"""Computes the attention of the bundled model's first layer in numpy.

In the first layer keys and queries depend only on the tokens and their positions. An evicted range
is therefore just left out of the softmax.
"""

from __future__ import annotations

from functools import cache

import gguf
import numpy as np
import numpy.typing as npt
from llama import MODEL

Floats = npt.NDArray[np.float32]


@cache
def _file() -> tuple[dict[str, Floats], dict[str, float]]:
    reader = gguf.GGUFReader(MODEL)
    weights = {t.name: np.array(t.data, np.float32) for t in reader.tensors[:6]}
    names = ("attention.head_count", "attention.head_count_kv", "rope.freq_base")
    return weights, {n: float(reader.fields[f"llama.{n}"].contents()) for n in names}


def _rotated(heads: Floats, positions: npt.NDArray[np.int64], base: float) -> Floats:
    """Applies RoPE: rotates each pair of neighbouring channels; shape [token, head, channel]."""
    size = heads.shape[-1]
    angle = positions[:, None] * base ** (-np.arange(0, size, 2) / size)[None, :]
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    even, odd = heads[..., 0::2], heads[..., 1::2]
    rotated = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(heads.shape).astype(np.float32)


def _half(values: Floats) -> Floats:
    """Rounds to 16-bit floats, as llama.cpp stores and multiplies them."""
    return values.astype(np.float16).astype(np.float32)


def queries_and_keys(tokens: list[int]) -> tuple[Floats, Floats]:
    """Returns queries and cached keys, each of shape [token, head, channel]."""
    weights, settings = _file()
    embedded = weights["token_embd.weight"][tokens]
    scale = np.sqrt((embedded**2).mean(axis=1, keepdims=True) + 1e-5)
    normed = _half(embedded / scale * weights["blk.0.attn_norm.weight"])
    positions, base = np.arange(len(tokens)), settings["rope.freq_base"]

    def heads(name: str, count: float) -> Floats:
        flat = normed @ weights[f"blk.0.{name}.weight"].T
        return _rotated(flat.reshape(len(tokens), int(count), -1), positions, base)

    queries = heads("attn_q", settings["attention.head_count"])
    keys = heads("attn_k", settings["attention.head_count_kv"])
    return queries, _half(keys)


def attention(tokens: list[int], row: int, hidden: range = range(0)) -> Floats:
    """Attention of the token at `row`, with the positions in `hidden` masked.

    The shape is [head, position], with the positions from 0 to `row`; each row sums to 1.
    """
    queries, keys = queries_and_keys(tokens[: row + 1])
    group = queries.shape[1] // keys.shape[1]
    keys = np.repeat(keys, group, axis=1)
    logits = np.einsum("hc,thc->ht", _half(queries[row]), keys) / np.sqrt(keys.shape[-1])
    logits[:, list(hidden)] = -np.inf
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    share: Floats = weights / weights.sum(axis=1, keepdims=True)
    return share
