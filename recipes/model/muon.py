"""Muon: momentum whose update is orthogonalised, for the matrices of the network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def orthogonalised(gradient: Tensor, steps: int = 5) -> Tensor:
    """Return roughly the nearest orthogonal matrix, by a Newton-Schulz iteration in bf16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = gradient.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        squared = x @ x.T
        x = a * x + (b * squared + c * squared @ squared) @ x
    return x.T if tall else x


class Muon:
    """Steps the given matrices along their orthogonalised Nesterov momentum."""

    def __init__(self, parameters: Sequence[Tensor], momentum: float = 0.95) -> None:
        self._parameters = parameters
        self._momenta = [torch.zeros_like(parameter) for parameter in parameters]
        self._momentum = momentum

    @torch.no_grad()
    def step(self, rate: float, decay: float = 0.0) -> None:
        """Apply one update from the parameters' gradients."""
        for parameter, momentum in zip(self._parameters, self._momenta, strict=True):
            if parameter.grad is None:
                continue
            momentum.lerp_(parameter.grad, 1 - self._momentum)
            update = parameter.grad.lerp(momentum, self._momentum)
            rows, columns = parameter.shape
            # A fused matrix is several square ones on top of each other.
            size = columns if rows % columns == 0 else rows
            pieces = zip(update.split(size, 0), parameter.data.split(size, 0), strict=True)
            for piece, target in pieces:
                turned = orthogonalised(piece).float()
                scale = max(1, turned.shape[0] / turned.shape[1]) ** 0.5
                target.mul_(1 - rate * decay).add_(turned, alpha=-rate * scale)
