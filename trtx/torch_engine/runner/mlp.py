"""The MLP of a decoder layer: dense, or a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trtx.checkpoint.experts import GateClamp
from trtx.torch_engine.runner.expert_load import LayerLoad
from trtx.torch_engine.runner.formats import Prepare
from trtx.torch_engine.runner.linear import Linear, Multiplier


class GatedActivation(Protocol):
    """The part of :class:`trtx.torch_engine.runner.kernels.Kernels` that an MLP uses."""

    def silu_and_mul(self, gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
        """``silu(gate) * up``: ``[n, 2 * intermediate]`` to ``[n, intermediate]``."""

    def gelu_and_mul(self, gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
        """As :meth:`silu_and_mul` with the tanh approximation of GELU."""

    def sigmoid(self, x: Tensor) -> Tensor:
        """The sigmoid of each element of a float32 tensor."""


class LayerMlp(Protocol):
    """Computes ``[n, hidden]`` from the normalised residual ``[n, hidden]``."""

    @property
    def input_scale(self) -> Tensor | None:
        """As :attr:`trtx.torch_engine.runner.linear.Linear.input_scale`."""

    def admit(self) -> None:
        """As :meth:`trtx.torch_engine.runner.linear.Linear.admit`, for all weights."""

    def __call__(self, x: Tensor, kernels: GatedActivation) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DenseMlp:
    gate_up: Linear  # hidden to 2 * intermediate: rows of gate, up
    down: Linear  # intermediate to hidden
    gates_with_gelu: bool = False  # else with SiLU

    @property
    def input_scale(self) -> Tensor | None:
        return self.gate_up.input_scale

    def admit(self) -> None:
        self.gate_up.admit()
        self.down.admit()

    def __call__(self, x: Tensor, kernels: GatedActivation) -> Tensor:
        gate = kernels.gelu_and_mul if self.gates_with_gelu else kernels.silu_and_mul
        return self.down(gate(self.gate_up(x), self.down.input_scale))


@dataclass(frozen=True, slots=True)
class ExpertScales:
    """Dequantization scales of the experts of one layer in float8_e4m3fn. All are float32."""

    gate_up: Tensor  # [experts, 2]: products of the weight's scale (gate, up) and the input's
    down: Tensor  # [experts]: products of the weight's scale and the input's
    input: Tensor  # scalar: of the input of all experts
    gated: Tensor  # scalar: of the input of all experts' down projections


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The router and the experts of one layer. The experts are in the engine's dtype or, with ``scales``, in float8."""

    router: Tensor  # [experts, hidden], in the engine's dtype
    gate_up: Tensor  # [held, 2 * intermediate, hidden]: an expert's rows of gate, up
    down: Tensor  # [held, hidden, intermediate]
    per_token: int
    normalizes: bool  # whether the weights of a token's experts are divided by their sum
    scales: ExpertScales | None = None
    # For dequantized weights: round the inputs of both matmuls as the checkpoint's format does.
    prepare: Prepare | None = None
    prepare_gated: Prepare | None = None
    router_bias: Tensor | None = None  # [experts]
    gate_up_bias: Tensor | None = None  # [held, 2 * intermediate]
    down_bias: Tensor | None = None  # [held, hidden]
    clamp: GateClamp | None = None  # None: silu(gate) * up
    first: int = 0  # the first of the experts that this rank holds
    load: LayerLoad | None = None  # counts tokens by expert, on one of the ranks

    @property
    def held(self) -> int:
        """The number of experts whose weights this rank holds."""
        return self.down.shape[0]

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all experts."""
        return self.held == self.router.shape[0]


class ExpertBackend(Protocol):
    """Computes the experts of one layer for routed tokens."""

    def admit(self, weights: ExpertWeights) -> None:
        """Announces a layer, once before its use. Raises UsageError if the backend can't compute it."""

    def __call__(self, x: Tensor, weights: ExpertWeights, kernels: GatedActivation) -> Tensor:
        """Returns for ``x`` [n, hidden] the weighted sum of each row's experts that are held, ``[n, hidden]``."""

    def added(self, x: Tensor, weights: ExpertWeights, kernels: GatedActivation, residual: Tensor) -> Tensor:
        """Returns ``residual`` [n, hidden] plus the result of :meth:`__call__`, rounded like a separate addition."""


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    weights: ExpertWeights
    backend: ExpertBackend

    @property
    def input_scale(self) -> None:
        return None

    def admit(self) -> None:
        self.backend.admit(self.weights)

    def __call__(self, x: Tensor, kernels: GatedActivation) -> Tensor:
        return self.backend(x, self.weights, kernels)

    def added(self, x: Tensor, kernels: GatedActivation, residual: Tensor) -> Tensor:
        """As :meth:`ExpertBackend.added`."""
        return self.backend.added(x, self.weights, kernels, residual)


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
    """Multiplies by one expert after the other, only by those to which a token was routed. Waits for the device.

    A row's bits depend only on that row, if the GEMM backend and ``silu_and_mul`` are batch-invariant. It supports no
    float8 weights.
    """

    def __init__(self, multiplier: Multiplier) -> None:
        self._multiplier = multiplier

    def admit(self, weights: ExpertWeights) -> None:
        self._multiplier.admit(weights.router, weights.router_bias)
        for stack, bias in ((weights.gate_up, weights.gate_up_bias), (weights.down, weights.down_bias)):
            self._multiplier.admit(stack[0], None if bias is None else bias[0])

    def __call__(self, x: Tensor, weights: ExpertWeights, kernels: GatedActivation) -> Tensor:
        experts, shares = route(self._multiplier(x, weights.router, weights.router_bias), weights)
        if weights.load is not None:
            weights.load.count(experts)
        x = x if weights.prepare is None else weights.prepare(x)
        outputs = torch.zeros(*experts.shape, x.shape[1], dtype=x.dtype, device=x.device)
        chosen, places = experts.flatten().sort(stable=True)
        counts = chosen.bincount(minlength=weights.router.shape[0]).tolist()
        held = slice(weights.first, weights.first + weights.held)
        for expert, pairs in enumerate(torch.split(places, counts)[held]):
            if not len(pairs):
                continue
            rows = x[pairs // weights.per_token]
            gated = self._gate(self._multiply(rows, weights.gate_up, weights.gate_up_bias, expert), weights, kernels)
            gated = gated if weights.prepare_gated is None else weights.prepare_gated(gated)
            outputs.view(-1, x.shape[1])[pairs] = self._multiply(gated, weights.down, weights.down_bias, expert)
        return weighted_sum(outputs, shares)

    def _multiply(self, x: Tensor, stack: Tensor, biases: Tensor | None, expert: int) -> Tensor:
        return self._multiplier(x, stack[expert], None if biases is None else biases[expert])

    @staticmethod
    def _gate(gate_up: Tensor, weights: ExpertWeights, kernels: GatedActivation) -> Tensor:
        if weights.clamp is None:
            return kernels.silu_and_mul(gate_up)
        return clamped_swiglu(gate_up, weights.clamp, kernels)

    def added(self, x: Tensor, weights: ExpertWeights, kernels: GatedActivation, residual: Tensor) -> Tensor:
        return self(x, weights, kernels) + residual


def clamped_swiglu(gate_up: Tensor, clamp: GateClamp, kernels: GatedActivation) -> Tensor:
    """The activation that :class:`GateClamp` describes: ``[n, 2 * intermediate]`` to ``[n, intermediate]``.

    It is computed in float32 and rounded once. May overwrite ``gate_up``.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp_(max=clamp.limit), up.clamp_(-clamp.limit, clamp.limit)
    glu = gate * kernels.sigmoid(gate * clamp.alpha)
    return up.add_(1).mul_(glu).to(gate_up.dtype).contiguous()


def weighted_sum(outputs: Tensor, shares: Tensor) -> Tensor:
    """Returns the sum of ``outputs`` [n, per_token, hidden] weighted by ``shares`` [n, per_token], added in float32 in
    the order of the experts.
    """
    total = outputs[:, 0].float() * shares[:, :1]
    for place in range(1, outputs.shape[1]):
        total += outputs[:, place] * shares[:, place, None].float()
    return total.to(outputs.dtype)
