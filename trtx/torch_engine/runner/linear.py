"""A product with a weight, as the decoder sees it: which format the weight is in is the product's own business."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trtx.torch_engine.runner.formats import Prepare


class FewRows(Enum):
    """Who computes products of at most ``MOST_ROWS`` rows of 16-bit weights on a GPU."""

    LIBRARY = "library"
    FUSED = "fused"  # kernels of ours, with what lies between them where they can: :class:`LayerProducts`


DEFAULT_FEW_ROWS = FewRows.FUSED
"""Of a runner: on an H100 a step of Qwen3-8B's shape takes 5.8 ms for one row, 6.7 with the library's."""

MOST_ROWS = 16
"""A tensor core's tile is no shorter."""


class Multiplier(Protocol):
    """``x @ weight.T + bias`` of tensors in one dtype: how that is computed, and so in what order it is summed."""

    def admit(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Told once of each weight ``[rows, columns]`` that it gets. Raises UsageError for one that it can't take."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """``[n, columns]`` to ``[n, rows]``, in ``out`` where that is given."""


class LibraryMultiplier:
    """What torch's libraries find fastest for the shapes at hand: a row's rounding depends on how many there are."""

    def admit(self, weight: Tensor, bias: Tensor | None = None) -> None:
        return None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


LIBRARY_MULTIPLIER = LibraryMultiplier()


class Linear(Protocol):
    """``x @ weight.T + bias``: ``[n, columns]`` to ``[n, rows]`` in the engine's dtype."""

    @property
    def input_scale(self) -> Tensor | None:
        """None: x is in the engine's dtype. Else x is float8_e4m3fn, and times this float32 scalar what it means."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A weight in the engine's dtype, stored so or dequantized when it was loaded.

    ``prepare`` rounds x as the checkpoint's format does, so that a dequantized weight gives what the format promises.
    """

    weight: Tensor  # [rows, columns]
    bias: Tensor | None = None  # [rows]
    prepare: Prepare | None = None
    multiplier: Multiplier = LIBRARY_MULTIPLIER

    @property
    def input_scale(self) -> None:
        return None

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiplier(x if self.prepare is None else self.prepare(x), self.weight, self.bias)


class LayerProducts(Protocol):
    """The four products of each layer with what else lies between rotation and attention: for passes of few tokens.

    Results are rounded wherever operations of their own would round theirs, but that a norm is not rounded by itself.
    """

    def takes(self, num_tokens: int) -> bool:
        """Whether it is for a pass of so many."""

    def qkv(self, residual: Tensor, layer: int) -> Tensor:
        """Of ``residual`` [n, hidden] normalised."""

    def output(self, attended: Tensor, layer: int, residual: Tensor) -> Tensor:
        """``residual`` [n, hidden] and the product of ``attended`` [n, q_size]."""

    def gate_up(self, residual: Tensor, layer: int) -> Tensor:
        """``silu(gate) * up`` of ``residual`` normalised: ``[n, intermediate]``."""

    def down(self, gated: Tensor, layer: int, residual: Tensor) -> Tensor:
        """``residual`` [n, hidden] and the product of ``gated``."""
