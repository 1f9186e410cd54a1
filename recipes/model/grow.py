"""Turns a trained model into a hybrid, with short convolutions between its attention layers.

The output projections of the new layers are zero, so that they add nothing at first. The
architecture `lfm2` normalises queries and keys, which the model was not trained with: the weights
of the norms are the mean sizes of its own queries and keys on chats of the corpus, over tokens and
heads. Recall is damaged at first; `recipes.model.train --init` restores it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from recipes import command
from recipes.model.checkpoint import load, save
from recipes.model.network import Layer, Model, NormedBlock
from recipes.model.rows import encoder, row
from recipes.model.train import layer_numbers

_EXAMPLES = """examples:
  python -m recipes.model.grow evoke_proxy/models/tiny-recall-f16.gguf out/model/grown.pt
  python -m recipes.model.train --init out/model/grown.pt --out out/model/hybrid --tokens 4e6
"""
_ROWS, _LENGTH = 12, 512


def grow(old: Model, convolved: tuple[int, ...], seed: int = 0) -> Model:
    """Return a hybrid with the old model's layers and short convolutions at these places."""
    torch.manual_seed(seed)
    shape = replace(old.shape, layers=old.shape.layers + len(convolved), convolved=convolved)
    new = Model(shape)
    new.emb.load_state_dict(old.emb.state_dict())
    new.nf.load_state_dict(old.nf.state_dict())
    sizes, remaining = _sizes(old, seed), iter(old.blocks)
    for layer in new.blocks:
        if isinstance(layer, NormedBlock):
            layer.load_state_dict(next(remaining).state_dict(), strict=False)
            for norm, size in zip((layer.qn, layer.kn), next(sizes), strict=True):
                nn.init.constant_(norm.weight, float(size))
        else:
            nn.init.zeros_(layer.o.weight)
            nn.init.zeros_(layer.dn.weight)
    return new


@torch.no_grad()
def _sizes(model: Model, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the root mean square of each layer's queries and of its keys, before RoPE."""
    (_, encode), rng = encoder(), random.Random(seed)
    inputs: dict[Layer, list[Tensor]] = {layer: [] for layer in model.blocks}
    for layer, kept in inputs.items():
        layer.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0]))
    for _ in range(_ROWS):
        chat, positions = row(rng, _LENGTH, encode)
        model.hidden(torch.tensor([chat.ids]), torch.from_numpy(positions)[None])
    for layer, kept in inputs.items():
        queries, keys, _ = layer.split(torch.cat(kept, 1))
        yield queries.square().mean().sqrt(), keys.square().mean().sqrt()


def main() -> None:
    """Grow one model."""
    parser = command("model.grow", __doc__, _EXAMPLES)
    parser.add_argument("model", type=Path, help="a .pt or .gguf file")
    parser.add_argument("out", type=Path, help="the .pt file to write")
    parser.add_argument(
        "--convolved", type=layer_numbers, default=(0, 3), help="places of the new layers (0,3)"
    )
    args = parser.parse_args()
    hybrid = grow(load(args.model), args.convolved)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save(args.out, hybrid, 0, 0)
    print(args.out, sum(p.numel() for p in hybrid.parameters()), "parameters")


if __name__ == "__main__":
    main()
