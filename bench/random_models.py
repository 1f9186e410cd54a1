"""Models with random weights, of any dense shape: right for exactness and cost, not for meaning.

The vocabulary is the bundled model's, so that chats can be rendered and counted. Files are made
once and kept in the cache folder, named by their shape.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from evoke_proxy.models import bundled_model
from evoke_proxy.server_build.cache import cache_dir


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides the cost of a dense model: `kv_bytes` a token follow from it."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    ff: int
    context: int
    theta: float = 1_000_000.0

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token at f16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size


SHAPES = {
    shape.name: shape
    for shape in (
        # The KV of Qwen2.5-7B (28 layers, 4 KV heads of 128), a narrow residual stream: what is
        # copied is as large as there, what is computed is cheaper, so ratios are understated.
        Shape("qwen2.5-7b-kv", 28, 512, 4, 4, 128, 1408, 32768),
        # 24 layers, for overheads a decode step can show.
        Shape("deep-24", 24, 256, 4, 2, 64, 704, 65536),
        # Two layers and a long context, for token accounting.
        Shape("long-2", 2, 128, 2, 1, 64, 256, 131072),
    )
}


def ensure(shape: Shape, seed: int = 0) -> Path:
    """The GGUF of this shape, written first if the cache has none."""
    path = cache_dir() / "models" / f"{shape.name}-{seed}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        _write(part, shape, np.random.default_rng(seed))
        part.rename(path)
    return path


def _write(path: Path, shape: Shape, random: np.random.Generator) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"random {shape.name}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.theta)
    writer.add_layer_norm_rms_eps(1e-5)
    n_vocab = _add_vocabulary(writer)
    writer.add_vocab_size(n_vocab)
    for name, size in _tensors(shape, n_vocab):
        if len(size) == 1:
            writer.add_tensor(name, np.ones(size, dtype=np.float32))
        else:
            weights = random.standard_normal(size, dtype=np.float32) / np.sqrt(size[-1])
            writer.add_tensor(name, weights.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(shape: Shape, n_vocab: int) -> list[tuple[str, tuple[int, ...]]]:
    query, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    found: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (n_vocab, shape.width)),
        ("output_norm.weight", (shape.width,)),
    ]
    for i in range(shape.layers):
        found += [
            (f"blk.{i}.attn_norm.weight", (shape.width,)),
            (f"blk.{i}.attn_q.weight", (query, shape.width)),
            (f"blk.{i}.attn_k.weight", (kv, shape.width)),
            (f"blk.{i}.attn_v.weight", (kv, shape.width)),
            (f"blk.{i}.attn_output.weight", (shape.width, query)),
            (f"blk.{i}.ffn_norm.weight", (shape.width,)),
            (f"blk.{i}.ffn_gate.weight", (shape.ff, shape.width)),
            (f"blk.{i}.ffn_up.weight", (shape.ff, shape.width)),
            (f"blk.{i}.ffn_down.weight", (shape.width, shape.ff)),
        ]
    return found


def _add_vocabulary(writer: gguf.GGUFWriter) -> int:
    """Tokenizer and chat template of the bundled model; the number of tokens."""
    given: dict[str, Any] = {
        key: field.contents() for key, field in gguf.GGUFReader(bundled_model()).fields.items()
    }
    writer.add_tokenizer_model(given["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(given["tokenizer.ggml.pre"])
    writer.add_token_list(given["tokenizer.ggml.tokens"])
    writer.add_token_types(given["tokenizer.ggml.token_type"])
    writer.add_token_merges(given["tokenizer.ggml.merges"])
    writer.add_eos_token_id(given["tokenizer.ggml.eos_token_id"])
    writer.add_bos_token_id(given["tokenizer.ggml.bos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(given["tokenizer.chat_template"])
    return len(given["tokenizer.ggml.tokens"])


def main(argv: Sequence[str] | None = None) -> int:
    """Write one shape and print its path."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.random_models",
        description=__doc__,
        epilog="example:\n  python -m bench.random_models deep-24",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    print(ensure(SHAPES[args.shape], args.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
