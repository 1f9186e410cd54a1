"""Writes LoRA adapters and control vectors with random weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from bench.random_models import SHAPES


def write_adapter(path: Path, seed: int, shape: str = "tiny-dense") -> None:
    """Writes a LoRA adapter for the attention of every layer of a random model."""
    random, model = np.random.default_rng(seed), SHAPES[shape]
    writer = gguf.GGUFWriter(path, model.arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for layer in range(model.layers):
        for part, heads in (("attn_q", model.heads), ("attn_v", model.kv_heads)):
            name = f"blk.{layer}.{part}.weight"
            a = random.standard_normal((4, model.width), np.float32) / 8
            b = random.standard_normal((heads * model.head_size, 4), np.float32) / 2
            writer.add_tensor(f"{name}.lora_a", a)
            writer.add_tensor(f"{name}.lora_b", b)
    _finish(writer)


def write_vector(path: Path, seed: int, shape: str = "tiny-dense") -> None:
    """Writes a control vector for every layer except the first."""
    random, model = np.random.default_rng(seed), SHAPES[shape]
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", model.arch)
    for layer in range(1, model.layers):
        writer.add_tensor(f"direction.{layer}", random.standard_normal(model.width, np.float32))
    _finish(writer)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
