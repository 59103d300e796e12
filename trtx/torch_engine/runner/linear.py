"""Linear layers as the decoder sees them, whatever format their weights have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trtx.torch_engine.runner.formats import Prepare

MOST_ROWS = 16
"""The most rows of a skinny GEMM: the height of a tensor core tile."""
OVERLAPPED_TOKENS = 512
"""Tokens of a forward up to which launches overlap their neighbours. In longer ones, a launch takes a small share."""


class Multiplier(Protocol):
    """A GEMM backend: computes ``x @ weight.T + bias`` in one dtype, and so defines the summation order."""

    def admit(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Announces a weight ``[rows, columns]``, once before its use.

        Raises UsageError if the backend can't multiply by it.
        """

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Returns ``[n, rows]`` for x ``[n, columns]``, in ``out`` if given."""


class LibraryMultiplier:
    """torch's libraries, which pick the fastest kernel for the shapes: the row count affects a row's rounding."""

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
        """None: x is in the engine's dtype.

        Otherwise x is float8_e4m3fn, and this float32 scalar is its dequantization scale.
        """

    def admit(self) -> None:
        """Announces the weight to its GEMM backend, once before its use. Raises UsageError if that can't use it."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A weight in the engine's dtype, stored like that or dequantized at load.

    ``prepare`` rounds x as the checkpoint's format does, so that a dequantized weight gives the format's results.
    """

    weight: Tensor  # [rows, columns]
    bias: Tensor | None = None  # [rows]
    prepare: Prepare | None = None
    multiplier: Multiplier = LIBRARY_MULTIPLIER

    @property
    def input_scale(self) -> None:
        return None

    def admit(self) -> None:
        self.multiplier.admit(self.weight, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiplier(x if self.prepare is None else self.prepare(x), self.weight, self.bias)


class LayerProducts(Protocol):
    """The matmuls of each layer with the operations between them, except RoPE and attention: for small forwards.

    Results are rounded where separate operations would round, except that a fused norm is not rounded on its own.
    """

    def takes(self, num_tokens: int) -> bool:
        """Whether it handles a forward with this number of tokens."""

    def qkv(self, residual: Tensor, layer: int) -> Tensor:
        """QKV projection of the normalised ``residual`` [n, hidden]."""

    def output(self, attended: Tensor, layer: int, residual: Tensor) -> Tensor:
        """Returns ``residual`` [n, hidden] plus the output projection of ``attended`` [n, q_size]."""

    def mlp(self, residual: Tensor, layer: int) -> Tensor:
        """Returns ``residual`` [n, hidden] plus the MLP of the normalised ``residual``."""
