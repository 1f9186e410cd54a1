"""Reads a model from a checkpoint or from an exported GGUF file, writes checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from recipes.model.network import Model, Shape

Array = TypeVar("Array", Tensor, Any)


def save(path: Path, model: Model, step: int, tokens: int) -> None:
    """Write the model, replacing an older file at once or not at all."""
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    half = path.with_suffix(".tmp")
    torch.save({"cfg": asdict(model.shape), "state": state, "step": step, "toks": tokens}, half)
    os.replace(half, path)


def load(path: Path) -> Model:
    """Return the model of a .pt checkpoint or of a .gguf file made by `recipes.model.export`."""
    shape, state = _from_gguf(path) if path.suffix == ".gguf" else _from_checkpoint(path)
    model = Model(shape)
    model.load_state_dict(state)
    return model


def _from_checkpoint(path: Path) -> tuple[Shape, dict[str, Tensor]]:
    saved = torch.load(path, weights_only=True)
    return Shape(**saved["cfg"]), saved["state"]


def architecture(shape: Shape) -> str:
    """What llama.cpp calls a model of this shape."""
    return "lfm2" if shape.convolved else "llama"


def halves(rows: Array, width: int) -> Array:
    """Heads of that many rows each with pairs (2i, 2i + 1) moved to (i, i + width / 2): from the
    order in which RoPE pairs the rows here to that of `lfm2`."""
    pairs = rows.reshape(-1, width // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def neighbours(rows: Array, width: int) -> Array:
    """What `halves` has moved, back in its place."""
    pairs = rows.reshape(-1, 2, width // 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _from_gguf(path: Path) -> tuple[Shape, dict[str, Tensor]]:
    from gguf import GGUFReader

    reader = GGUFReader(str(path))
    tensors = {t.name: torch.from_numpy(t.data.copy()).float() for t in reader.tensors}
    shape = _shape(reader, tensors)
    norm = "token_embd_norm.weight" if shape.convolved else "output_norm.weight"
    state = {"emb.weight": tensors["token_embd.weight"], "nf.weight": tensors[norm]}
    for index in range(shape.layers):
        state.update(_block(index, tensors, shape))
    return shape, state


def _shape(reader: Any, tensors: Mapping[str, Tensor]) -> Shape:
    name = reader.fields["general.architecture"].contents()

    def number(key: str) -> int:
        return int(reader.fields[f"{name}.{key}"].contents())

    layers = range(number("block_count"))
    convolved = tuple(i for i in layers if f"blk.{i}.shortconv.conv.weight" in tensors)
    heads = reader.fields[f"{name}.attention.head_count_kv"].contents()
    return Shape(
        vocab=tensors["token_embd.weight"].shape[0],
        d=number("embedding_length"),
        layers=len(layers),
        heads=number("attention.head_count"),
        kv_heads=max(heads) if convolved else int(heads),
        head_dim=number("attention.key_length"),
        ff=number("feed_forward_length"),
        theta=float(reader.fields[f"{name}.rope.freq_base"].contents()),
        convolved=convolved,
        taps=number("shortconv.l_cache") if convolved else Shape().taps,
    )


def _block(index: int, tensors: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    there, here = f"blk.{index}.", f"blocks.{index}."

    def joined(*names: str) -> Tensor:
        return torch.cat([tensors[f"{there}{name}.weight"] for name in names])

    def turned(name: str) -> Tensor:
        return neighbours(joined(name), shape.head_dim) if shape.convolved else joined(name)

    found = {
        f"{here}n1.weight": joined("attn_norm"),
        f"{here}n2.weight": joined("ffn_norm"),
        f"{here}gu.weight": joined("ffn_gate", "ffn_up"),
        f"{here}dn.weight": joined("ffn_down"),
    }
    if index in shape.convolved:
        found[f"{here}into.weight"] = joined("shortconv.in_proj")
        found[f"{here}o.weight"] = joined("shortconv.out_proj")
        return found | {f"{here}kernel": joined("shortconv.conv").T.contiguous()}
    if shape.convolved:
        found |= {f"{here}{name}n.weight": turned(f"attn_{name}_norm") for name in ("q", "k")}
    fused = torch.cat([turned("attn_q"), turned("attn_k"), joined("attn_v")])
    return found | {f"{here}qkv.weight": fused, f"{here}o.weight": joined("attn_output")}
