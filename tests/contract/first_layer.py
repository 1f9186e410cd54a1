"""Computes the attention of the bundled model's first layer from weights and tokens.

There it depends on nothing but the tokens and their positions, so that holes need no emulation.
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
    """Each pair of neighbouring channels turned by its angle; [token, head, channel]."""
    size = heads.shape[-1]
    angle = positions[:, None] * base ** (-np.arange(0, size, 2) / size)[None, :]
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    even, odd = heads[..., 0::2], heads[..., 1::2]
    turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(heads.shape).astype(np.float32)


def _half(values: Floats) -> Floats:
    """As it is stored, or multiplied, at 16 bits."""
    return values.astype(np.float16).astype(np.float32)


def queries_and_keys(tokens: list[int]) -> tuple[Floats, Floats]:
    """[token, head, channel] of queries and of the keys in the cache."""
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
    """What the token at `row` looks at: [head, position up to itself], without the hidden ones."""
    queries, keys = queries_and_keys(tokens[: row + 1])
    group = queries.shape[1] // keys.shape[1]
    keys = np.repeat(keys, group, axis=1)
    logits = np.einsum("hc,thc->ht", _half(queries[row]), keys) / np.sqrt(keys.shape[-1])
    logits[:, list(hidden)] = -np.inf
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    share: Floats = weights / weights.sum(axis=1, keepdims=True)
    return share
