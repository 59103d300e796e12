"""Batch-invariant matmuls: a row's bits depend only on that row, not on the number of rows or its place among them.

A library chooses its kernel, and with it the summation order, by the number of rows. Here there are a few *tilings*,
each a computation of one fixed shape, and a matmul uses the cheapest tiling for its row count among those that give the
same bits. This is tested, not assumed: when a weight is admitted, every tiling runs on random rows, at several places
among other rows. A tiling whose bits depend on the place is dropped. Of the others, the largest set of tilings that
agree in every bit is used for weights of that shape. Inside a library, shapes, dtype, alignment and threads decide the
summation order, and all four are the same in later calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from trtx.errors import UsageError

_ALIGNMENT = 64  # bytes: torch's allocations have it, and vectorised code depends on it
_SHIFTS = (1, 7, 13)  # offsets by which the probe's rows are rolled
_CPU_ROWS = (2, 4, 8, 16, 32, 64)


class Tiling(Protocol):
    """One way to compute a matmul."""

    @property
    def rows(self) -> int:
        """Rows of x in one pass: the tiling is the cheapest for this number, or slightly fewer."""

    def takes(self, weight: Tensor) -> bool:
        """Whether the tiling can compute a matmul with this weight at all."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """``x`` [n, columns] for any n, ``weight`` [rows, columns], ``out`` [n, rows]."""


class InvariantMultiplier:
    """A :class:`trtx.torch_engine.runner.linear.Multiplier` with batch-invariant rows."""

    def __init__(
        self,
        tilings: Sequence[Tiling],
        *,
        x_dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        """``tilings`` in ascending order of their rows. ``x_dtype`` None: the weight's; ``out_dtype`` None: x's."""
        self._tilings = tuple(tilings)
        self._x_dtype = x_dtype
        self._out_dtype = out_dtype
        self._admitted: dict[tuple[object, ...], tuple[Tiling, ...]] = {}

    def admit(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Tests the tilings for a weight.

        Raises UsageError if no tiling is invariant to a row's place, which has not happened on any CPU or GPU so far.
        """
        key = _key(weight, bias)
        if key in self._admitted:
            return
        tilings = [one for one in self._tilings if one.takes(weight)]
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(tilings[-1].rows, weight.shape[1], generator=generator)
        x = probe.to(weight.device, weight.dtype if self._x_dtype is None else self._x_dtype)
        agreeing: list[Tiling] = []
        for at in range(len(tilings), 0, -1):
            if len(agreeing) >= at:
                break  # those left are not more
            reference = self._run(tilings[at - 1], x, weight, bias)
            same = [one for one in tilings[:at] if self._is_free(one, x, weight, bias, reference)]
            agreeing = max(agreeing, same, key=len)
        if not agreeing:
            raise UsageError(
                f"--deterministic is not possible on this {weight.device.type}, because a matmul with a weight of "
                f"{tuple(weight.shape)} in {weight.dtype} rounds a row differently at other places; leave it out"
            )
        self._admitted[key] = tuple(agreeing)

    def tilings(self, weight: Tensor, bias: Tensor | None = None) -> tuple[Tiling, ...]:
        """The tilings in use for an admitted weight."""
        return self._admitted[_key(weight, bias)]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        tilings = self._admitted[_key(weight, bias)]
        fitting = next((one for one in tilings if one.rows >= x.shape[0]), tilings[-1])
        return self._run(fitting, x, weight, bias, out)

    def _run(self, tiling: Tiling, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        if out is None:
            dtype = x.dtype if self._out_dtype is None else self._out_dtype
            out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device)
        tiling(x.contiguous(), weight, bias, out)
        return out

    def _is_free(self, tiling: Tiling, x: Tensor, weight: Tensor, bias: Tensor | None, reference: Tensor) -> bool:
        """Whether the tiling gives ``reference`` for x, for its first row alone, and for x with its rows rolled."""
        if not torch.equal(self._run(tiling, x[:1].clone(), weight, bias), reference[:1]):
            return False
        return all(
            torch.equal(self._run(tiling, _rolled(x, shift), weight, bias), reference.roll(shift, 0))
            for shift in (0, *_SHIFTS)
        )


@dataclass(frozen=True, slots=True)
class RowTile:
    """On a CPU: torch's library, always over exactly ``rows`` rows of aligned memory, padded with zeros."""

    rows: int

    def takes(self, weight: Tensor) -> bool:
        return True

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        for begin in range(0, x.shape[0], self.rows):
            tile = x[begin : begin + self.rows]
            count = tile.shape[0]
            if count < self.rows or tile.data_ptr() % _ALIGNMENT:
                padded = torch.zeros(self.rows, x.shape[1], dtype=x.dtype)
                padded[:count] = tile
                tile = padded
            out[begin : begin + count] = F.linear(tile, weight, bias)[:count]


def cpu_multiplier() -> InvariantMultiplier:
    return InvariantMultiplier([RowTile(rows) for rows in _CPU_ROWS])


def _key(weight: Tensor, bias: Tensor | None) -> tuple[object, ...]:
    return weight.shape, weight.dtype, bias is not None


def _rolled(x: Tensor, shift: int) -> Tensor:
    """Rolls x's rows by ``shift``; as bytes, since torch can't roll float8 on a GPU."""
    return x.view(torch.uint8).roll(shift, 0).view(x.dtype)
