"""Reads a model from a checkpoint or from an exported GGUF file, writes checkpoints."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.model.network import Model, Shape


def save(path: Path, model: Model, step: int, tokens: int) -> None:
    """Write the model, replacing an older file at once or not at all."""
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    half = path.with_suffix(".tmp")
    torch.save({"cfg": asdict(model.shape), "state": state, "step": step, "toks": tokens}, half)
    os.replace(half, path)


def load(path: Path) -> Model:
    """Return the model of a .pt checkpoint or of a .gguf file made by `bench.model.export`."""
    shape, state = _from_gguf(path) if path.suffix == ".gguf" else _from_checkpoint(path)
    model = Model(shape)
    model.load_state_dict(state)
    return model


def _from_checkpoint(path: Path) -> tuple[Shape, dict[str, Tensor]]:
    saved = torch.load(path, weights_only=True)
    return Shape(**saved["cfg"]), saved["state"]


def _from_gguf(path: Path) -> tuple[Shape, dict[str, Tensor]]:
    from gguf import GGUFReader

    reader = GGUFReader(str(path))
    tensors = {t.name: torch.from_numpy(t.data.copy()).float() for t in reader.tensors}
    shape = Shape(
        vocab=tensors["token_embd.weight"].shape[0],
        d=_number(reader, "llama.embedding_length"),
        layers=_number(reader, "llama.block_count"),
        heads=_number(reader, "llama.attention.head_count"),
        kv_heads=_number(reader, "llama.attention.head_count_kv"),
        head_dim=_number(reader, "llama.attention.key_length"),
        ff=_number(reader, "llama.feed_forward_length"),
        theta=float(reader.fields["llama.rope.freq_base"].contents()),
    )
    state = {"emb.weight": tensors["token_embd.weight"], "nf.weight": tensors["output_norm.weight"]}
    for index in range(shape.layers):
        state.update(_block(index, tensors))
    return shape, state


def _block(index: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    there, here = f"blk.{index}.", f"blocks.{index}."

    def joined(*names: str) -> Tensor:
        return torch.cat([tensors[f"{there}{name}.weight"] for name in names])

    return {
        f"{here}n1.weight": joined("attn_norm"),
        f"{here}n2.weight": joined("ffn_norm"),
        f"{here}qkv.weight": joined("attn_q", "attn_k", "attn_v"),
        f"{here}o.weight": joined("attn_output"),
        f"{here}gu.weight": joined("ffn_gate", "ffn_up"),
        f"{here}dn.weight": joined("ffn_down"),
    }


def _number(reader: Any, key: str) -> int:
    return int(reader.fields[key].contents())
