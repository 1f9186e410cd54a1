"""Settings and tensors of the architectures whose attention is sparse.

An index, one more key for each row, chooses the rows that attention reads. The index is so small
here that it leaves out most rows of a short text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import gguf

from .tensor import EXPERTS, EXPERTS_USED, Tensor

if TYPE_CHECKING:
    from .random_models import Shape

LATENT = frozenset(("deepseek32", "glm-dsa", "dots3note"))  # one compressed row for all heads
SPARSE = LATENT | {"minimax-m3", "deepseek4", "qwen4exp"}
WITH_OUTPUT = frozenset(("minimax-m3", "deepseek4"))  # their output matrix is not the embedding

_QUERY_RANK, _ROW_RANK, _ROTATED = (
    64,
    64,
    32,
)  # of latent attention: queries, a row, its rotated part
_INDEX_HEADS, _INDEX_TOP = 4, 48  # of the index; how many rows it chooses
_BLOCK, _TOP_BLOCKS = 16, 3  # of MSA, which chooses whole blocks
_STREAMS, _LOW_RANK = 4, 8  # residual streams and the rank of what mixes them
_GROUPS, _OUTPUT_RANK = 2, 16  # of the output matrix of deepseek4
_RATIOS = {
    "deepseek4": (0, 0, 4, 128),
    "qwen4exp": (4, 4, 4, 4),
}  # tokens for one index key, by layer


def head_sizes(shape: Shape) -> tuple[int, int, int]:
    """Channels of a key and of a value in the cache, and how many of the key are rotated."""
    if shape.arch in LATENT:
        return _ROW_RANK + _ROTATED, _ROW_RANK, _ROTATED
    rotated = _ROTATED if shape.arch in SPARSE else shape.head_size
    return shape.head_size, shape.head_size, rotated


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
    writer.add_uint32(f"{attention}.indexer.head_count", heads)
    writer.add_uint32(f"{attention}.indexer.key_length", _index_size(shape))
    top = _TOP_BLOCKS if name == "minimax-m3" else _INDEX_TOP
    writer.add_uint32(f"{attention}.indexer.top_k", top)
    writer.add_uint32(f"{attention}.indexer.block_size", _BLOCK)
    writer.add_uint32(f"{attention}.indexer.local_blocks", 1)
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


def model_tensors(shape: Shape, n_vocab: int) -> Iterator[Tensor]:
    """Tensors of the model beside those that all models have."""
    if shape.arch in WITH_OUTPUT:
        yield Tensor("output.weight", (n_vocab, shape.width))
    mixed = _STREAMS * shape.width
    if shape.arch == "deepseek4":
        yield Tensor("output_hc_fn.weight", (_STREAMS, mixed), exact=True)
        yield Tensor("output_hc_base.weight", (_STREAMS,))
        yield Tensor("output_hc_scale.weight", (1,))
    if shape.arch == "qwen4exp":
        yield from _low_rank("output_hc", mixed)


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
    mixed = _STREAMS * shape.width
    for name in ("hc_attn", "hc_ffn"):
        if shape.arch == "deepseek4":
            mix = (2 + _STREAMS) * _STREAMS
            yield Tensor(f"{name}_fn.weight", (mix, mixed), exact=True)
            yield Tensor(f"{name}_base.weight", (mix,))
            yield Tensor(f"{name}_scale.weight", (3,))
        if shape.arch == "qwen4exp":
            yield from _low_rank(name, mixed)
            yield Tensor(f"{name}_inject.weight", (_STREAMS, mixed))


def layer_experts(shape: Shape, layer: int) -> Iterator[Tensor]:
    """The feed-forward part: the first layer of most has no experts."""
    if shape.arch != "qwen4exp":
        yield Tensor("ffn_norm.weight", (shape.width,))
    if layer < 1 and shape.arch not in ("deepseek4", "qwen4exp"):
        yield from _gated("", (), shape)
        return
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


def _low_rank(name: str, mixed: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}_norm.weight", (mixed,))
    yield Tensor(f"{name}_down.weight", (_LOW_RANK, mixed))
    yield Tensor(f"{name}_up.weight", (mixed, _LOW_RANK))


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
