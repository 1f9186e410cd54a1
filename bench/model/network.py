"""A small llama-style language model: RMSNorm, RoPE, grouped queries, SwiGLU, tied embedding.

RoPE pairs neighbours (2i, 2i + 1), exactly what llama.cpp computes for the architecture `llama`,
so the export permutes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's hyper-parameters; the names are those of the checkpoint files."""

    vocab: int = 2048
    d: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ff: int = 512
    theta: float = 500_000.0
    eps: float = 1e-5
    maxpos: int = 16_384


class RMSNorm(nn.Module):
    """Divides by the root mean square and scales."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [batch, time, heads, width] by [batch, time, 1, width / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Block(nn.Module):
    """Attention and feed-forward, both behind a norm; names as in the checkpoint files."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.n1, self.n2 = RMSNorm(shape.d, shape.eps), RMSNorm(shape.d, shape.eps)
        fused = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = nn.Linear(shape.d, fused, bias=False)
        self.o = nn.Linear(shape.heads * shape.head_dim, shape.d, bias=False)
        self.gu = nn.Linear(shape.d, 2 * shape.ff, bias=False)
        self.dn = nn.Linear(shape.ff, shape.d, bias=False)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values before RoPE, each [batch, time, heads, width]."""
        s, (rows, time, _) = self.shape, x.shape
        fused = self.qkv(self.n1(x)).view(rows, time, s.heads + 2 * s.kv_heads, s.head_dim)
        queries, keys, values = fused.split([s.heads, s.kv_heads, s.kv_heads], 2)
        return queries, keys, values

    def mix(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the attention's and the feed-forward's output to the residual stream."""
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        gate, up = self.gu(self.n2(x)).chunk(2, -1)
        return x + self.dn(F.silu(gate) * up)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return causal attention of [batch, time, heads, width] as [batch, heads, time, width]."""
        repeat = self.shape.heads // self.shape.kv_heads
        k, v = (x.transpose(1, 2).repeat_interleave(repeat, 1) for x in (k, v))
        q = q.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.split(x)
        q, k = rope(q, cos, sin).to(v.dtype), rope(k, cos, sin).to(v.dtype)
        return self.mix(x, self.attend(q, k, v, None))


class Model(nn.Module):
    """The whole model; positions are free, so a row may have gaps in them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.emb = nn.Embedding(shape.vocab, shape.d)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.nf = RMSNorm(shape.d, shape.eps)
        self._initialise()
        inverse = shape.theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.arange(shape.maxpos).float()[:, None] * inverse[None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                spread = 0.02 if name.startswith("emb") else parameter.shape[1] ** -0.5
                nn.init.normal_(parameter, 0, spread)
            if name.endswith(("o.weight", "dn.weight")):
                parameter.data.mul_(1 / math.sqrt(2 * self.shape.layers))

    def hidden(self, ids: Tensor, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the last layer's normed output for [batch, time] ids at their positions."""
        x = self.emb(ids)
        x = x if dtype is None else x.to(dtype)
        cos, sin = (table[positions][:, :, None].to(x.dtype) for table in (self.cos, self.sin))
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.nf(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of the vocabulary; the embedding is tied."""
        return F.linear(hidden, self.emb.weight.to(hidden.dtype))

    @torch.no_grad()
    def extend(
        self,
        ids: list[int],
        positions: list[int],
        cache: list[tuple[Tensor, Tensor]] | None = None,
        keep: list[int] | None = None,
        keep_positions: list[int] | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Read ids on top of chosen cache entries; returns [time, vocab] logits and new entries.

        A cache entry holds a layer's keys before RoPE, so `keep` may be read at any positions:
        their own (holes) or closed up (re-indexed).
        """
        x, time = self.emb(torch.tensor([ids])), len(ids)
        new, mask, kept = [], None, len(keep or [])
        if keep is not None:
            mask = torch.ones(time, kept + time, dtype=torch.bool).tril(kept)
        for index, block in enumerate(self.blocks):
            q, raw, v = block.split(x)
            new.append((raw, v))
            q, k = rope(q, *self._tables(positions)), rope(raw, *self._tables(positions))
            if cache is not None and keep is not None:
                old_k, old_v = cache[index]
                turned = rope(old_k[:, keep], *self._tables(keep_positions or keep))
                k, v = torch.cat([turned, k], 1), torch.cat([old_v[:, keep], v], 1)
            x = block.mix(x, block.attend(q, k, v, mask))
        return self.logits(self.nf(x))[0], new

    def _tables(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        at = torch.tensor(positions)
        return self.cos[at][None, :, None], self.sin[at][None, :, None]
