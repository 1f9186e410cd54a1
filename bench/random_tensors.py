"""The settings and tensors that llama.cpp needs for a model of each architecture.

Layers of hybrids alternate, a recurrent layer first; so do layers with a sliding window. Sizes are
in the order of numpy: rows, then columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import gguf

from . import sparse_tensors as sparse
from .tensor import EXPERTS, EXPERTS_USED, Tensor

if TYPE_CHECKING:
    from .random_models import Shape

RECURRENT = frozenset(
    ("mamba", "jamba", "lfm2", "qwen35", "qwen4exp")
)  # on their even layers, or on all
MROPE = frozenset(("qwen2vl", "qwen35", "qwen4exp"))
DELTA_NETS = frozenset(("qwen35", "qwen4exp"))

_CONV = 4  # tokens a convolution sees
_STATE = 16  # of a Mamba layer, for each channel
_RANK = 8  # of a Mamba layer's step
_SOFT_CAP = 0.5  # so low that random weights reach it


def is_recurrent(shape: Shape, layer: int) -> bool:
    """Whether the layer keeps a state instead of rows."""
    return shape.arch == "mamba" or (shape.arch in RECURRENT and layer % 2 == 0)


def add_settings(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """What this architecture needs beyond what all of them do."""
    if shape.arch in ("jamba", "lfm2"):
        kv_heads = [0 if is_recurrent(shape, i) else shape.kv_heads for i in range(shape.layers)]
        writer.add_head_count_kv(kv_heads)
    else:
        writer.add_head_count_kv(shape.kv_heads)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.arch == "gemma3":
        writer.add_sliding_window_pattern([i % 2 == 0 for i in range(shape.layers)])
    if shape.arch == "gemma2":
        writer.add_attn_logit_softcapping(_SOFT_CAP)
    if shape.arch == "gpt-oss":
        writer.add_expert_feed_forward_length(shape.ff)
    if shape.arch in MROPE:
        quarter = sparse.head_sizes(shape)[2] // 8
        writer.add_rope_dimension_sections([quarter, quarter, 2 * quarter, 0])
    if shape.arch == "phi3":
        writer.add_rope_scaling_orig_ctx_len(shape.context // 8)
    if shape.arch == "lfm2":
        writer.add_shortconv_l_cache(_CONV)
    if shape.moe:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(EXPERTS_USED)
    if shape.arch in ("mamba", "jamba"):
        _add_ssm(writer, 2 * shape.width, _STATE, _RANK)
    if shape.mtp:
        writer.add_nextn_predict_layers(1)
    if shape.arch in DELTA_NETS:
        writer.add_full_attention_interval(2)
        writer.add_ssm_group_count(shape.kv_heads)
        _add_ssm(writer, shape.heads * shape.head_size, shape.head_size, shape.heads)
    if shape.arch in sparse.SPARSE:
        sparse.add_sparse_settings(writer, shape)


def _add_ssm(writer: gguf.GGUFWriter, inner: int, state: int, rank: int) -> None:
    writer.add_ssm_conv_kernel(_CONV)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)


def tensors(shape: Shape, n_vocab: int) -> Iterator[Tensor]:
    """All tensors of a model of this shape; the output matrix is the embedding."""
    yield Tensor("token_embd.weight", (n_vocab, shape.width))
    if shape.arch != "qwen4exp":
        name = "token_embd_norm" if shape.arch == "lfm2" else "output_norm"
        yield Tensor(f"{name}.weight", (shape.width,))
    yield from sparse.model_tensors(shape, n_vocab)
    if shape.arch == "gpt-oss":
        yield Tensor("output.weight", (n_vocab, shape.width))
    if shape.arch == "phi3":
        yield Tensor("rope_factors_long.weight", (shape.head_size // 2,), factor=8.0)
        yield Tensor("rope_factors_short.weight", (shape.head_size // 2,))
    for i in range(shape.layers):
        for part in _layer(shape, i):
            yield Tensor(f"blk.{i}.{part.name}", part.size, part.exact, part.sign)
    if shape.mtp:
        for part in _next_token_head(shape):
            yield Tensor(f"blk.{shape.layers}.{part.name}", part.size, part.exact, part.sign)


def _layer(shape: Shape, layer: int) -> Iterator[Tensor]:
    mixers = {"lfm2": _short_conv, "qwen35": _delta_net, "qwen4exp": _delta_net}
    recurrent = is_recurrent(shape, layer)
    if shape.arch != "qwen4exp":
        yield Tensor("attn_norm.weight", (shape.width,))
    if recurrent:
        yield from mixers.get(shape.arch, _mamba)(shape)
    elif shape.arch not in sparse.LATENT | {"deepseek4"}:
        yield from _attention(shape)
    if shape.arch in sparse.SPARSE:
        yield from () if recurrent else sparse.layer_attention(shape, layer)
        yield from sparse.layer_streams(shape)
        yield from sparse.layer_experts(shape, layer)
    elif shape.arch != "mamba":
        yield from _feed_forward(shape)


def _next_token_head(shape: Shape) -> Iterator[Tensor]:
    """One more layer of attention, which reads the last hidden state and the next token."""
    yield Tensor("attn_norm.weight", (shape.width,))
    yield from _attention(shape)
    yield from _feed_forward(shape)
    yield Tensor("nextn.eh_proj.weight", (shape.width, 2 * shape.width))
    yield Tensor("nextn.enorm.weight", (shape.width,))
    yield Tensor("nextn.hnorm.weight", (shape.width,))


def _attention(shape: Shape) -> Iterator[Tensor]:
    query, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    gate = 2 if shape.arch in DELTA_NETS else 1  # its queries come with a gate of their size
    yield Tensor("attn_q.weight", (gate * query, shape.width))
    yield Tensor("attn_k.weight", (kv, shape.width))
    yield Tensor("attn_v.weight", (kv, shape.width))
    yield Tensor("attn_output.weight", (shape.width, query))
    if shape.arch in ("gemma3", "lfm2", "qwen35", "qwen4exp", "minimax-m3"):
        yield Tensor("attn_q_norm.weight", (shape.head_size,))
        yield Tensor("attn_k_norm.weight", (shape.head_size,))
    if shape.arch == "gpt-oss":
        yield Tensor("attn_sinks.weight", (shape.heads,))
        yield Tensor("attn_output.bias", (shape.width,))


def _feed_forward(shape: Shape) -> Iterator[Tensor]:
    if shape.arch in ("gemma2", "gemma3", "gpt-oss", "qwen35"):
        yield Tensor("post_attention_norm.weight", (shape.width,))
    if shape.arch not in ("gpt-oss", "qwen35"):
        yield Tensor("ffn_norm.weight", (shape.width,))
    if shape.arch in ("gemma2", "gemma3"):
        yield Tensor("post_ffw_norm.weight", (shape.width,))
    if shape.moe:
        yield Tensor("ffn_gate_inp.weight", (EXPERTS, shape.width), exact=True)
    many, suffix = ((EXPERTS,), "_exps") if shape.moe else ((), "")
    if shape.arch == "phi3":  # the gate and what it is for are one matrix
        yield Tensor("ffn_up.weight", (2 * shape.ff, shape.width))
    else:
        yield Tensor(f"ffn_gate{suffix}.weight", (*many, shape.ff, shape.width))
        yield Tensor(f"ffn_up{suffix}.weight", (*many, shape.ff, shape.width))
    yield Tensor(f"ffn_down{suffix}.weight", (*many, shape.width, shape.ff))
    if shape.arch == "gpt-oss":
        yield Tensor("ffn_gate_inp.bias", (EXPERTS,))
        yield Tensor("ffn_gate_exps.bias", (EXPERTS, shape.ff), exact=True)
        yield Tensor("ffn_up_exps.bias", (EXPERTS, shape.ff), exact=True)
        yield Tensor("ffn_down_exps.bias", (EXPERTS, shape.width), exact=True)


def _mamba(shape: Shape) -> Iterator[Tensor]:
    inner = 2 * shape.width
    yield Tensor("ssm_in.weight", (2 * inner, shape.width))
    yield Tensor("ssm_conv1d.weight", (inner, _CONV), exact=True)
    yield Tensor("ssm_conv1d.bias", (inner,))
    yield Tensor("ssm_x.weight", (_RANK + 2 * _STATE, inner))
    yield Tensor("ssm_dt.weight", (inner, _RANK))
    yield Tensor("ssm_dt.bias", (inner,))
    yield Tensor("ssm_a", (inner, _STATE), exact=True, sign=-1)
    yield Tensor("ssm_d", (inner,))
    yield Tensor("ssm_out.weight", (shape.width, inner))
    if shape.arch == "jamba":
        yield Tensor("ssm_dt_norm.weight", (_RANK,))
        yield Tensor("ssm_b_norm.weight", (_STATE,))
        yield Tensor("ssm_c_norm.weight", (_STATE,))


def _short_conv(shape: Shape) -> Iterator[Tensor]:
    yield Tensor("shortconv.conv.weight", (shape.width, _CONV), exact=True)
    yield Tensor("shortconv.in_proj.weight", (3 * shape.width, shape.width))
    yield Tensor("shortconv.out_proj.weight", (shape.width, shape.width))


def _delta_net(shape: Shape) -> Iterator[Tensor]:
    """A gated delta net: `kv_heads` keys, `heads` values, all of `head_size`."""
    keys, values = shape.kv_heads * shape.head_size, shape.heads * shape.head_size
    yield Tensor("attn_qkv.weight", (2 * keys + values, shape.width))
    yield Tensor("attn_gate.weight", (values, shape.width))
    yield Tensor("ssm_conv1d.weight", (2 * keys + values, _CONV), exact=True)
    yield Tensor("ssm_dt.bias", (shape.heads,))
    yield Tensor("ssm_a", (shape.heads,), sign=-1)
    yield Tensor("ssm_beta.weight", (shape.heads, shape.width))
    yield Tensor("ssm_alpha.weight", (shape.heads, shape.width))
    yield Tensor("ssm_norm.weight", (shape.head_size,))
    yield Tensor("ssm_out.weight", (shape.width, values))
