"""The MLP of a decoder layer: dense, or a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trtx.torch_engine.runner.linear import Linear, Multiplier


class GatedActivation(Protocol):
    """The part of :class:`trtx.torch_engine.runner.kernels.Kernels` that an MLP uses."""

    def silu_and_mul(self, gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
        """``silu(gate) * up``: ``[n, 2 * intermediate]`` to ``[n, intermediate]``."""


class LayerMlp(Protocol):
    """Computes ``[n, hidden]`` from the normalised residual ``[n, hidden]``."""

    @property
    def input_scale(self) -> Tensor | None:
        """As :attr:`trtx.torch_engine.runner.linear.Linear.input_scale`."""

    def __call__(self, x: Tensor, kernels: GatedActivation) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DenseMlp:
    gate_up: Linear  # hidden to 2 * intermediate: rows of gate, up
    down: Linear  # intermediate to hidden

    @property
    def input_scale(self) -> Tensor | None:
        return self.gate_up.input_scale

    def __call__(self, x: Tensor, kernels: GatedActivation) -> Tensor:
        return self.down(kernels.silu_and_mul(self.gate_up(x), self.down.input_scale))


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The router and the experts of one layer, in the engine's dtype."""

    router: Tensor  # [experts, hidden]
    gate_up: Tensor  # [experts, 2 * intermediate, hidden]: an expert's rows of gate, up
    down: Tensor  # [experts, hidden, intermediate]
    per_token: int
    normalizes: bool  # whether the weights of a token's experts are divided by their sum


class ExpertBackend(Protocol):
    """Computes the experts of one layer for routed tokens."""

    def __call__(self, x: Tensor, weights: ExpertWeights, kernels: GatedActivation) -> Tensor:
        """Returns for ``x`` [n, hidden] the weighted sum of each row's experts, ``[n, hidden]``."""


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    weights: ExpertWeights
    backend: ExpertBackend

    @property
    def input_scale(self) -> None:
        return None

    def __call__(self, x: Tensor, kernels: GatedActivation) -> Tensor:
        return self.backend(x, self.weights, kernels)


def route(logits: Tensor, weights: ExpertWeights) -> tuple[Tensor, Tensor]:
    """Returns each row's experts ``[n, per_token]`` int64, best first, and their weights in the dtype of ``logits``.

    As transformers' router does, with probabilities in float32. The sort is stable, so that of experts with equal
    probabilities the first ones win in any batch; the logits of a 16-bit model are often equal.
    """
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    ordered, experts = probabilities.sort(dim=-1, descending=True, stable=True)
    shares = ordered[:, : weights.per_token]
    if weights.normalizes:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return experts[:, : weights.per_token], shares.to(logits.dtype)


class LoopedExperts:
    """Multiplies by one expert after the other, those that a token was routed to. Waits for the device.

    A row's bits depend only on that row, if the GEMM backend and ``silu_and_mul`` are batch-invariant.
    """

    def __init__(self, multiplier: Multiplier) -> None:
        self._multiplier = multiplier

    def __call__(self, x: Tensor, weights: ExpertWeights, kernels: GatedActivation) -> Tensor:
        experts, shares = route(self._multiplier(x, weights.router), weights)
        outputs = torch.empty(*experts.shape, x.shape[1], dtype=x.dtype, device=x.device)
        chosen, places = experts.flatten().sort(stable=True)
        counts = chosen.bincount(minlength=weights.router.shape[0]).tolist()
        for expert, pairs in enumerate(torch.split(places, counts)):
            if not counts[expert]:
                continue
            rows = x[pairs // weights.per_token]
            gated = kernels.silu_and_mul(self._multiplier(rows, weights.gate_up[expert]))
            outputs.view(-1, x.shape[1])[pairs] = self._multiplier(gated, weights.down[expert])
        return weighted_sum(outputs, shares)


def weighted_sum(outputs: Tensor, shares: Tensor) -> Tensor:
    """Adds ``outputs`` [n, per_token, hidden] with the weights ``shares`` [n, per_token], in this order, in float32."""
    total = outputs[:, 0].float() * shares[:, :1]
    for place in range(1, outputs.shape[1]):
        total += outputs[:, place] * shares[:, place, None].float()
    return total.to(outputs.dtype)
