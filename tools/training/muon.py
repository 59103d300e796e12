"""Muon in float32. torch's own (2.13) multiplies in bfloat16, which takes ten times as long on a CPU without it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

_COEFFICIENTS, _STEPS, _EPSILON = (3.4445, -4.775, 2.0315), 5, 1e-7  # as in torch


class Float32Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalized by Newton and Schulz's iteration. For matrices only."""

    def __init__(self, matrices: Iterable[torch.Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
                update = _orthogonal(matrix.grad.lerp(state["momentum"], group["momentum"]))
                rate = group["lr"] * math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))
                matrix.add_(update, alpha=-rate)


def _orthogonal(gradient: torch.Tensor) -> torch.Tensor:
    a, b, c = _COEFFICIENTS
    is_tall = gradient.shape[0] > gradient.shape[1]
    x: torch.Tensor = gradient.T if is_tall else gradient
    x = x / (x.norm() + _EPSILON)
    for _ in range(_STEPS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x
