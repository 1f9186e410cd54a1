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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.split(x)
        repeat = self.shape.heads // self.shape.kv_heads
        q, k = rope(q, cos, sin).to(v.dtype), rope(k, cos, sin).to(v.dtype)
        k, v = (each.transpose(1, 2).repeat_interleave(repeat, 1) for each in (k, v))
        attended = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        return self.feed(x + self.o(attended.transpose(1, 2).flatten(2)))


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
        inner, outer, value = self.into(self.n1(x)).chunk(3, -1)
        seen, time = F.pad(inner * value, (0, 0, self.shape.taps - 1, 0)), x.shape[1]
        kernel = self.kernel.to(x.dtype)
        mixed = sum(seen[:, tap : tap + time] * row for tap, row in enumerate(kernel))
        return self.feed(x + self.o(outer * mixed))


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
