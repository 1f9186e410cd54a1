"""The settings and tensors that llama.cpp needs for a model of each architecture.

Layers of hybrids alternate, a recurrent layer first; so do layers with a sliding window. Sizes are
in the order of numpy: rows, then columns. In the architectures of `SPARSE` an index, one more key
for each row, chooses the rows that attention reads; it is so small here that it leaves out most
rows of a short text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import gguf

if TYPE_CHECKING:
    from bench.random_models import Shape

EXPERTS, EXPERTS_USED = 4, 2


@dataclass(frozen=True, slots=True)
class Tensor:
    """`exact`: kept at f32, as what is not multiplied must be. `sign` -1: all below zero. `factor`:
    the value of all of it, where it has one dimension."""

    name: str
    size: tuple[int, ...]
    exact: bool = False
    sign: int = 1
    factor: float = 1.0


LATENT = frozenset(("deepseek32", "glm-dsa", "dots3note"))  # one compressed row for all heads
SPARSE = LATENT | {"minimax-m3", "deepseek4", "qwen4exp"}
# Their output matrix is not the embedding.
WITH_OUTPUT = frozenset(("minimax-m3", "deepseek4", "gpt-oss"))

# Of latent attention: queries, a row, its rotated part.
_QUERY_RANK, _ROW_RANK, _ROTATED = 64, 64, 32
_INDEX_HEADS, _INDEX_TOP = 4, 48  # of the index; how many rows it chooses
_BLOCK, _TOP_BLOCKS = 16, 3  # of MSA, which chooses whole blocks
_STREAMS, _LOW_RANK = 4, 8  # residual streams and the rank of what mixes them
_GROUPS, _OUTPUT_RANK = 2, 16  # of the output matrix of deepseek4
# Tokens for one index key, by layer.
_RATIOS = {"deepseek4": (0, 0, 4, 128), "qwen4exp": (4, 4, 4, 4)}


def head_sizes(shape: Shape) -> tuple[int, int, int]:
    """Channels of a key and of a value in the cache, and how many of the key are rotated."""
    if shape.arch in LATENT:
        return _ROW_RANK + _ROTATED, _ROW_RANK, _ROTATED
    return shape.head_size, shape.head_size, _ROTATED if shape.arch in SPARSE else shape.head_size


def add_sparse_settings(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """What an architecture with an index needs beyond what all of them do."""
    name, attention = shape.arch, f"{shape.arch}.attention"
    writer.add_leading_dense_block_count(0 if name == "deepseek4" else 1)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(EXPERTS_USED)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(shape.ff)
    writer.add_expert_shared_feed_forward_length(shape.ff)
    writer.add_expert_weights_scale(1.0)
    writer.add_expert_weights_norm(True)
    writer.add_uint32(f"{name}.expert_gating_func", 4 if name == "deepseek4" else 2)
    heads = shape.kv_heads if name == "minimax-m3" else _INDEX_HEADS
    top = _TOP_BLOCKS if name == "minimax-m3" else _INDEX_TOP
    index = {"head_count": heads, "key_length": _index_size(shape), "top_k": top}
    for key, value in (index | {"block_size": _BLOCK, "local_blocks": 1}).items():
        writer.add_uint32(f"{attention}.indexer.{key}", value)
    writer.add_q_lora_rank(_QUERY_RANK)
    if name in LATENT:
        for suffix in ("", "_swa"):
            writer.add_uint32(f"{attention}.kv_lora_rank{suffix}", _ROW_RANK)
            writer.add_uint32(f"{attention}.key_length_mla{suffix}", shape.head_size)
            writer.add_uint32(f"{attention}.value_length_mla{suffix}", shape.head_size)
        writer.add_uint32(f"{attention}.key_length_swa", _ROW_RANK + _ROTATED)
        writer.add_uint32(f"{attention}.value_length_swa", _ROW_RANK)
    if name in ("glm-dsa", "dots3note"):
        own = [int(has_index(shape, i)) for i in range(shape.layers)]
        writer.add_array(f"{attention}.indexer.types", own)
    if name == "dots3note":
        writer.add_sliding_window_pattern([i % 2 == 1 for i in range(shape.layers)])
        writer.add_float32(f"{name}.rope.freq_base_swa", shape.theta)
    if name in _RATIOS:
        writer.add_array(f"{attention}.compress_ratios", list(_RATIOS[name][: shape.layers]))
        writer.add_uint32(f"{name}.hyper_connection.count", _STREAMS)
        writer.add_float32(f"{name}.hyper_connection.epsilon", 1e-6)
        writer.add_uint32(f"{name}.hyper_connection.sinkhorn_iterations", 2)
        writer.add_uint32(f"{name}.hyper_connection.low_rank", _LOW_RANK)
    if name == "deepseek4":
        writer.add_uint32(f"{attention}.output_group_count", _GROUPS)
        writer.add_uint32(f"{attention}.output_lora_rank", _OUTPUT_RANK)
        writer.add_float32(f"{attention}.compress_rope_freq_base", shape.theta)
        writer.add_uint32(f"{name}.hash_layer_count", 0)
        writer.add_float32(f"{name}.swiglu_clamp_exp", 10.0)


def _index_size(shape: Shape) -> int:
    """Channels of an index key; upstream's memory of deepseek4 divides by zero at the head size."""
    return shape.head_size * (2 if shape.arch == "deepseek4" else 1)


def has_index(shape: Shape, layer: int) -> bool:
    """Whether a layer has an index of its own; the others use that of a layer before, or none."""
    if shape.arch in ("glm-dsa", "dots3note"):
        return layer % 2 == 0
    return shape.arch != "minimax-m3" or layer >= 1


def layer_attention(shape: Shape, layer: int) -> Iterator[Tensor]:
    """The attention of one layer, with its index."""
    if shape.arch in LATENT:
        yield from _latent(shape, layer)
    elif shape.arch == "deepseek4":
        yield from _compressed(shape, layer)
    elif has_index(shape, layer):
        heads = shape.kv_heads if shape.arch == "minimax-m3" else _INDEX_HEADS
        yield Tensor("indexer.q_proj.weight", (heads * shape.head_size, shape.width))
        yield Tensor("indexer.k_proj.weight", (shape.head_size, shape.width))
        yield Tensor("indexer.q_norm.weight", (shape.head_size,))
        yield Tensor("indexer.k_norm.weight", (shape.head_size,))


def layer_streams(shape: Shape) -> Iterator[Tensor]:
    """What mixes the residual streams of one layer, where there are several."""
    for name in ("hc_attn", "hc_ffn"):
        yield from _mixer(name, shape, (2 + _STREAMS) * _STREAMS, 3)
        if shape.arch == "qwen4exp":
            yield Tensor(f"{name}_inject.weight", (_STREAMS, _STREAMS * shape.width))


def _mixer(name: str, shape: Shape, weights: int, scales: int) -> Iterator[Tensor]:
    """What mixes the residual streams in one place; nothing where there is one stream."""
    mixed = _STREAMS * shape.width
    if shape.arch == "deepseek4":
        yield Tensor(f"{name}_fn.weight", (weights, mixed), exact=True)
        yield Tensor(f"{name}_base.weight", (weights,))
        yield Tensor(f"{name}_scale.weight", (scales,))
    if shape.arch == "qwen4exp":
        yield Tensor(f"{name}_norm.weight", (mixed,))
        yield Tensor(f"{name}_down.weight", (_LOW_RANK, mixed))
        yield Tensor(f"{name}_up.weight", (mixed, _LOW_RANK))


def layer_experts(shape: Shape, layer: int) -> Iterator[Tensor]:
    """The feed-forward part: the first layer of most has no experts."""
    if layer < 1 and shape.arch not in ("deepseek4", "qwen4exp"):
        yield from _feed_forward(shape)
        return
    if shape.arch != "qwen4exp":
        yield Tensor("ffn_norm.weight", (shape.width,))
    yield Tensor("ffn_gate_inp.weight", (EXPERTS, shape.width), exact=True)
    if shape.arch == "qwen4exp":
        yield Tensor("ffn_gate_inp_shexp.weight", (shape.width,))
    else:
        yield Tensor("exp_probs_b.bias", (EXPERTS,))
    yield from _gated("_exps", (EXPERTS,), shape)
    yield from _gated("_shexp", (), shape)


def _gated(suffix: str, many: tuple[int, ...], shape: Shape) -> Iterator[Tensor]:
    yield Tensor(f"ffn_gate{suffix}.weight", (*many, shape.ff, shape.width))
    yield Tensor(f"ffn_up{suffix}.weight", (*many, shape.ff, shape.width))
    yield Tensor(f"ffn_down{suffix}.weight", (*many, shape.width, shape.ff))


def _latent(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Multi-head latent attention: a row is a compressed vector and one rotated key."""
    heads, size = shape.heads, shape.head_size
    yield Tensor("attn_q_a.weight", (_QUERY_RANK, shape.width))
    yield Tensor("attn_q_a_norm.weight", (_QUERY_RANK,))
    yield Tensor("attn_q_b.weight", (heads * size, _QUERY_RANK))
    yield Tensor("attn_kv_a_mqa.weight", (_ROW_RANK + _ROTATED, shape.width))
    yield Tensor("attn_kv_a_norm.weight", (_ROW_RANK,))
    yield Tensor("attn_k_b.weight", (heads, _ROW_RANK, size - _ROTATED))
    yield Tensor("attn_v_b.weight", (heads, size, _ROW_RANK))
    yield Tensor("attn_output.weight", (shape.width, heads * size))
    if shape.arch == "dots3note":
        yield Tensor("attn_k_norm.weight", (_ROTATED,))
        yield Tensor("attn_gate.weight", (heads, shape.width))
    if has_index(shape, layer):
        yield Tensor("indexer.k_norm.weight", (size,))
        yield Tensor("indexer.k_norm.bias", (size,))
        yield Tensor("indexer.proj.weight", (_INDEX_HEADS, shape.width))
        yield Tensor("indexer.attn_k.weight", (size, shape.width))
        yield Tensor("indexer.attn_q_b.weight", (_INDEX_HEADS * size, _QUERY_RANK))


def _compressed(shape: Shape, layer: int) -> Iterator[Tensor]:
    """Attention of deepseek4: most layers read rows that stand for several tokens."""
    heads, size, ratio = shape.heads, shape.head_size, _RATIOS["deepseek4"][layer]
    yield Tensor("attn_sinks.weight", (heads,))
    yield Tensor("attn_q_a.weight", (_QUERY_RANK, shape.width))
    yield Tensor("attn_q_a_norm.weight", (_QUERY_RANK,))
    yield Tensor("attn_q_b.weight", (heads * size, _QUERY_RANK))
    yield Tensor("attn_kv.weight", (size, shape.width))
    yield Tensor("attn_kv_a_norm.weight", (size,))
    yield Tensor("attn_output_a.weight", (_OUTPUT_RANK * _GROUPS, heads * size // _GROUPS))
    yield Tensor("attn_output_b.weight", (shape.width, _GROUPS * _OUTPUT_RANK))
    if ratio:
        yield from _compressor("attn", size, ratio, shape)
    if ratio == 4:
        yield Tensor("indexer.proj.weight", (_INDEX_HEADS, shape.width))
        yield Tensor("indexer.attn_q_b.weight", (_INDEX_HEADS * _index_size(shape), _QUERY_RANK))
        yield from _compressor("indexer", _index_size(shape), ratio, shape)


def _compressor(name: str, size: int, ratio: int, shape: Shape) -> Iterator[Tensor]:
    width = 2 * size if ratio == 4 else size
    yield Tensor(f"{name}_compressor_kv.weight", (width, shape.width))
    yield Tensor(f"{name}_compressor_gate.weight", (width, shape.width))
    yield Tensor(f"{name}_compressor_ape.weight", (ratio, width), exact=True)
    yield Tensor(f"{name}_compressor_norm.weight", (size,))


# On their even layers, or on all.
RECURRENT = frozenset(("mamba", "jamba", "lfm2", "qwen35", "qwen4exp"))
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
    kv_heads = [0 if is_recurrent(shape, i) else shape.kv_heads for i in range(shape.layers)]
    writer.add_head_count_kv(kv_heads if shape.arch in ("jamba", "lfm2") else shape.kv_heads)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.arch == "gemma3":
        writer.add_sliding_window_pattern([i % 2 == 0 for i in range(shape.layers)])
    if shape.arch == "gemma2":
        writer.add_attn_logit_softcapping(_SOFT_CAP)
    if shape.arch == "gpt-oss":
        writer.add_expert_feed_forward_length(shape.ff)
    if shape.arch in MROPE:
        quarter = head_sizes(shape)[2] // 8
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
    if shape.arch in SPARSE:
        add_sparse_settings(writer, shape)


def _add_ssm(writer: gguf.GGUFWriter, inner: int, state: int, rank: int) -> None:
    writer.add_ssm_conv_kernel(_CONV)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)


def tensors(shape: Shape, n_vocab: int) -> Iterator[Tensor]:
    """All tensors of a model of this shape; the output matrix of most is the embedding."""
    yield Tensor("token_embd.weight", (n_vocab, shape.width))
    if shape.arch != "qwen4exp":
        name = "token_embd_norm" if shape.arch == "lfm2" else "output_norm"
        yield Tensor(f"{name}.weight", (shape.width,))
    if shape.arch in WITH_OUTPUT:
        yield Tensor("output.weight", (n_vocab, shape.width))
    yield from _mixer("output_hc", shape, _STREAMS, 1)
    if shape.arch == "phi3":
        yield Tensor("rope_factors_long.weight", (shape.head_size // 2,), factor=8.0)
        yield Tensor("rope_factors_short.weight", (shape.head_size // 2,))
    layers = [_layer(shape, i) for i in range(shape.layers)]
    for i, parts in enumerate([*layers, *([_next_token_head(shape)] if shape.mtp else [])]):
        for part in parts:
            yield replace(part, name=f"blk.{i}.{part.name}")


def _layer(shape: Shape, layer: int) -> Iterator[Tensor]:
    mixers = {"lfm2": _short_conv, "qwen35": _delta_net, "qwen4exp": _delta_net}
    recurrent = is_recurrent(shape, layer)
    if shape.arch != "qwen4exp":
        yield Tensor("attn_norm.weight", (shape.width,))
    if recurrent:
        yield from mixers.get(shape.arch, _mamba)(shape)
    elif shape.arch not in LATENT | {"deepseek4"}:
        yield from _attention(shape)
    if shape.arch in SPARSE:
        yield from () if recurrent else layer_attention(shape, layer)
        yield from layer_streams(shape)
        yield from layer_experts(shape, layer)
    elif shape.arch != "mamba":
        yield from _feed_forward(shape)


def _next_token_head(shape: Shape) -> Iterator[Tensor]:
    """One more layer of attention, which reads the last hidden state and the next token."""
    yield from _layer(shape, 1)
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
    if shape.arch == "phi3":  # the gate and what it is for are one matrix
        yield Tensor("ffn_up.weight", (2 * shape.ff, shape.width))
        yield Tensor("ffn_down.weight", (shape.width, shape.ff))
    else:
        yield from _gated("_exps" if shape.moe else "", (EXPERTS,) * shape.moe, shape)
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
