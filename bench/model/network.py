"""A small llama-style language model: RMSNorm, RoPE, grouped queries, SwiGLU, tied embedding.

RoPE pairs neighbours (2i, 2i + 1), exactly what llama.cpp computes for the architecture `llama`,
so the export of one permutes nothing. With short convolutions among its layers it is a hybrid of
the architecture `lfm2`: there queries and keys are normed, and the export permutes them.
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
    convolved: tuple[int, ...] = ()  # layers that are short convolutions; any: a hybrid
    taps: int = 3  # tokens that a short convolution sees, the present one included


class RMSNorm(nn.Module):
    """Divides by the root mean square and scales."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


Tables = tuple[Tensor, Tensor]  # RoPE's cosines and sines at some positions
Entry = tuple[Tensor, Tensor]  # what a layer remembers of some tokens: [1, time, ...] each


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [batch, time, heads, width] by [batch, time, 1, width / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Layer(nn.Module):
    """What every layer has: two norms and the feed-forward; names as in the checkpoint files."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.n1, self.n2 = RMSNorm(shape.d, shape.eps), RMSNorm(shape.d, shape.eps)
        self.gu = nn.Linear(shape.d, 2 * shape.ff, bias=False)
        self.dn = nn.Linear(shape.ff, shape.d, bias=False)

    def feed(self, x: Tensor) -> Tensor:
        """Add the feed-forward's output to the residual stream."""
        gate, up = self.gu(self.n2(x)).chunk(2, -1)
        return x + self.dn(F.silu(gate) * up)


class Block(Layer):
    """Attention and feed-forward, both behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        fused = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = nn.Linear(shape.d, fused, bias=False)
        self.o = nn.Linear(shape.heads * shape.head_dim, shape.d, bias=False)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values before RoPE, each [batch, time, heads, width]."""
        s, (rows, time, _) = self.shape, x.shape
        fused = self.qkv(self.n1(x)).view(rows, time, s.heads + 2 * s.kv_heads, s.head_dim)
        queries, keys, values = fused.split([s.heads, s.kv_heads, s.kv_heads], 2)
        return queries, keys, values

    def mix(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add the attention's and the feed-forward's output to the residual stream."""
        return self.feed(x + self.o(attended.transpose(1, 2).flatten(2)))

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

    def step(self, x: Tensor, at: Tables, kept: Entry | None, were: Tables) -> tuple[Tensor, Entry]:
        """Read tokens on top of kept entries; returns the output and the new entries.

        An entry holds keys before RoPE and values; `at` and `were` say where the tokens are.
        """
        (q, raw, v), mask = self.split(x), None
        entry, (q, k) = (raw, v), (rope(q, *at), rope(raw, *at))
        if kept is not None:
            count = kept[0].shape[1]
            mask = torch.ones(x.shape[1], count + x.shape[1], dtype=torch.bool).tril(count)
            k, v = torch.cat([rope(kept[0], *were), k], 1), torch.cat([kept[1], v], 1)
        return self.mix(x, self.attend(q, k, v, mask)), entry


class NormedBlock(Block):
    """Attention whose queries and keys are normed before RoPE, as `lfm2` has it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.qn, self.kn = (RMSNorm(shape.head_dim, shape.eps) for _ in range(2))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = super().split(x)
        return self.qn(queries), self.kn(keys), values


class ShortConv(Layer):
    """A gated convolution over the last few tokens in place of the attention, as in `lfm2`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.into = nn.Linear(shape.d, 3 * shape.d, bias=False)
        self.kernel = nn.Parameter(torch.randn(shape.taps, shape.d) * shape.taps**-0.5)
        self.o = nn.Linear(shape.d, shape.d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._convolve(x, None)[0]

    def step(self, x: Tensor, at: Tables, kept: Entry | None, were: Tables) -> tuple[Tensor, Entry]:
        """Read tokens behind the last kept ones; an entry holds the convolution's input, twice."""
        out, gated = self._convolve(x, None if kept is None else kept[0])
        return out, (gated, gated)

    def _convolve(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the layer's output and what went into the convolution, [batch, time, width]."""
        inner, outer, value = self.into(self.n1(x)).chunk(3, -1)
        gated, time = inner * value, x.shape[1]
        seen = gated if before is None else torch.cat([before[:, 1 - self.shape.taps :], gated], 1)
        seen = F.pad(seen, (0, 0, time + self.shape.taps - 1 - seen.shape[1], 0))
        kernel = self.kernel.to(x.dtype)
        mixed = sum(seen[:, tap : tap + time] * row for tap, row in enumerate(kernel))
        return self.feed(x + self.o(outer * mixed)), gated


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a named parameter maps vectors to vectors: not a table, a norm or a kernel."""
    return parameter.dim() == 2 and not name.startswith("emb") and not name.endswith("kernel")


class Model(nn.Module):
    """The whole model; positions are free, so a row may have gaps in them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.emb = nn.Embedding(shape.vocab, shape.d)
        attention = NormedBlock if shape.convolved else Block
        self.blocks = nn.ModuleList(
            (ShortConv if index in shape.convolved else attention)(shape)
            for index in range(shape.layers)
        )
        self.nf = RMSNorm(shape.d, shape.eps)
        self._initialise()
        inverse = shape.theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.arange(shape.maxpos).float()[:, None] * inverse[None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if is_matrix(name, parameter) or name.startswith("emb"):
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
        cache: list[Entry] | None = None,
        keep: list[int] | None = None,
        keep_positions: list[int] | None = None,
    ) -> tuple[Tensor, list[Entry]]:
        """Read ids on top of chosen cache entries; returns [time, vocab] logits and new entries.

        A cache entry holds a layer's keys before RoPE, so `keep` may be read at any positions:
        their own (holes) or closed up (re-indexed). A short convolution goes on from the last
        kept entries, which must be those right before `ids`.
        """
        x, new = self.emb(torch.tensor([ids])), []
        at, were = self._tables(positions), self._tables(keep_positions or keep or [])
        for index, block in enumerate(self.blocks):
            kept = None
            if cache is not None and keep is not None:
                old_k, old_v = cache[index]
                kept = old_k[:, keep], old_v[:, keep]
            x, entry = block.step(x, at, kept, were)
            new.append(entry)
        return self.logits(self.nf(x))[0], new

    def _tables(self, positions: list[int]) -> Tables:
        at = torch.tensor(positions, dtype=torch.long)
        return self.cos[at][None, :, None], self.sin[at][None, :, None]
