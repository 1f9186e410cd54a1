"""One tensor of a model with random weights, and numbers that all architectures share."""

from __future__ import annotations

from dataclasses import dataclass

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
