"""Writes models with random weights, for every kind of memory.

They measure exactness and cost; their text has no meaning. The vocabulary is that of the bundled
model, so that chats can be rendered and counted, or one of the vocabulary-only models of the pinned
llama.cpp, which counts tokens as common models do. Files are written once, into the cache folder,
and named by their shape."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bench.random_tensors import Tensor, add_settings, head_sizes, tensors
from evoke_proxy.models import bundled_model
from evoke_proxy.server_build import patches_dir
from evoke_proxy.server_build.cache import cache_dir
from evoke_proxy.server_build.fetch import pristine_source, read_pin


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides memory and cost of a model. `window`: what sliding layers see; `bos`: whether
    the vocabulary begins every text with a token of its own; `mtp`: it has a head that proposes the
    token after the next, for speculative decoding; `thinks`: it has one for each end of a
    thought, as those of models that think do; `packed`: matrices are Q4_K; `vocabulary`: which
    ggml-vocab-NAME.gguf of the pinned tree it has, without a chat template. Empty: the bundled."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    ff: int
    context: int
    theta: float = 1_000_000.0
    arch: str = "llama"
    moe: bool = False
    window: int = 0
    bos: bool = False
    packed: bool = False
    mtp: bool = False
    thinks: bool = False
    vocabulary: str = ""

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token at f16, were all layers of full attention."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size


_READ = tomllib.loads(Path(__file__).with_name("random_models.toml").read_text("utf-8"))
_TINY = {name: _READ["sizes_of_tiny"] | of for name, of in _READ["tiny"].items()}
SHAPES = {name: Shape(name, **of) for name, of in (_READ["shapes"] | _TINY).items()}


_THOUGHT = ("<think>", "</think>")


def ensure(shape: Shape, seed: int = 0) -> Path:
    """The GGUF of this shape, written first if the cache has none."""
    return _cached(f"{shape.name}-{seed}", seed, partial(_write, shape))


def _cached(name: str, seed: int, write: Callable[[Path, np.random.Generator], None]) -> Path:
    """Return a file of the cache, written first if there is none."""
    path = cache_dir() / "models" / f"{name}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        write(part, np.random.default_rng(seed))
        part.rename(path)
    return path


# A small projector of images, of the kind of LLaVA: two layers of a vision transformer, of which
# upstream uses all but the last, and a perceptron. Images become 16 rows.
_IMAGE, _PATCH, _VISION, _VISION_FF = 56, 14, 64, 128
IMAGE_ROWS = (_IMAGE // _PATCH) ** 2


def ensure_projector(width: int, seed: int = 0) -> Path:
    """The GGUF of a projector for models of this width, written first if the cache has none."""
    return _cached(f"projector-{width}-{seed}", seed, partial(_write_projector, width))


def _write_projector(width: int, path: Path, random: np.random.Generator) -> None:
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_name(f"random projector {width}")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)
    writer.add_vision_image_size(_IMAGE)
    writer.add_vision_patch_size(_PATCH)
    writer.add_vision_embedding_length(_VISION)
    writer.add_vision_feed_forward_length(_VISION_FF)
    writer.add_vision_block_count(2)
    writer.add_vision_head_count(1)
    writer.add_vision_projection_dim(width)
    writer.add_vision_attention_layernorm_eps(1e-5)
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])
    for name, size in _projector_tensors(width):
        ones = name.endswith(("ln1.weight", "ln2.weight"))
        weights = random.standard_normal(size, dtype=np.float32) / np.float32(np.sqrt(size[-1]))
        writer.add_tensor(name, np.ones(size, np.float32) if ones else weights)
    _finish(writer)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _projector_tensors(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "v.patch_embd.weight", (_VISION, 3, _PATCH, _PATCH)
    yield "v.position_embd.weight", (IMAGE_ROWS, _VISION)
    for layer in range(2):
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            yield f"v.blk.{layer}.{name}.weight", (_VISION, _VISION)
        for name in ("ln1", "ln2"):
            yield f"v.blk.{layer}.{name}.weight", (_VISION,)
            yield f"v.blk.{layer}.{name}.bias", (_VISION,)
        yield f"v.blk.{layer}.ffn_up.weight", (_VISION_FF, _VISION)
        yield f"v.blk.{layer}.ffn_down.weight", (_VISION, _VISION_FF)
    yield "mm.0.weight", (width, _VISION)
    yield "mm.0.bias", (width,)
    yield "mm.2.weight", (width, width)
    yield "mm.2.bias", (width,)


def _write(shape: Shape, path: Path, random: np.random.Generator) -> None:
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_name(f"random {shape.name}")
    kind = gguf.LlamaFileType.MOSTLY_Q4_K_M if shape.packed else gguf.LlamaFileType.MOSTLY_F16
    writer.add_file_type(kind)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers + shape.mtp)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    add_settings(writer, shape)
    key, value, rotated = head_sizes(shape)
    writer.add_key_length(key)
    writer.add_value_length(value)
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(shape.theta)
    writer.add_layer_norm_rms_eps(1e-5)
    n_vocab = _add_vocabulary(writer, shape)
    writer.add_vocab_size(n_vocab)
    for tensor in tensors(shape, n_vocab):
        if shape.packed and len(tensor.size) == 2:
            packed = _packed(tensor.size, random)
            writer.add_tensor(tensor.name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
        else:
            writer.add_tensor(tensor.name, _weights(tensor, random))
    _finish(writer)


def _weights(tensor: Tensor, random: np.random.Generator) -> np.ndarray[Any, Any]:
    if len(tensor.size) == 1:
        return np.full(tensor.size, tensor.sign * tensor.factor, dtype=np.float32)
    weights = random.standard_normal(tensor.size, dtype=np.float32)
    if tensor.sign < 0:
        return -np.abs(weights)
    scaled = weights / np.float32(np.sqrt(tensor.size[-1]))
    return scaled if tensor.exact else scaled.astype(np.float16)


def _packed(size: tuple[int, ...], random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Q4_K blocks of evenly spread weights, as wide as those of `_weights` (ggml's block_q4_K: d,
    dmin, eight pairs of 6-bit scales, 256 weights of 4 bits; w = d * scale * q - dmin * min)."""
    rows, columns = size
    scale = 8  # every scale and every min, in the packing of get_scale_min_k4
    step = 1 / (scale * np.sqrt((16**2 - 1) / 12 * columns))
    blocks = random.integers(0, 256, (rows, columns // 256, 144), dtype=np.uint8)
    blocks[:, :, :2] = np.array([step], np.float16).view(np.uint8)
    blocks[:, :, 2:4] = np.array([7.5 * step], np.float16).view(np.uint8)
    blocks[:, :, 4:12] = scale
    blocks[:, :, 12:16] = scale << 4 | scale
    return blocks.reshape(rows, -1)


def _add_vocabulary(writer: gguf.GGUFWriter, shape: Shape) -> int:
    """Tokenizer and chat template of the bundled model or of another; the number of tokens."""
    source = vocabulary_file(shape.vocabulary) if shape.vocabulary else bundled_model()
    metadata: dict[str, Any] = {
        key: field.contents() for key, field in gguf.GGUFReader(source).fields.items()
    }
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    if shape.thinks:
        tokens, types = [*tokens, *_THOUGHT], [*types, *[gguf.TokenType.USER_DEFINED] * 2]
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_eos_token_id(metadata["tokenizer.ggml.eos_token_id"])
    if "tokenizer.ggml.bos_token_id" in metadata:
        writer.add_bos_token_id(metadata["tokenizer.ggml.bos_token_id"])
    writer.add_add_bos_token(shape.bos)
    if "tokenizer.chat_template" in metadata:
        writer.add_chat_template(metadata["tokenizer.chat_template"])
    return len(tokens)


def vocabulary_file(name: str) -> Path:
    """The vocabulary-only model of this name in the pinned tree, fetched first if it is missing."""
    return _pinned_tree() / "models" / f"ggml-vocab-{name}.gguf"


def chat_template(name: str) -> Path:
    """The chat template `name`.jinja of the pinned tree, fetched first if it is missing."""
    path = _pinned_tree() / "models" / "templates" / f"{name}.jinja"
    if not path.is_file():
        raise FileNotFoundError(f"the pinned llama.cpp has no template {name}")
    return path


def _pinned_tree() -> Path:
    return pristine_source(read_pin(patches_dir()), cache_dir(), lambda _: None)
