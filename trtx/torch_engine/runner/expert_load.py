"""The load of experts: how many tokens the router of each layer sends to each expert, counted on the device.

Rank 0 counts for all ranks, because every rank routes the same tokens. The host reads the counts with the results of a
step, at most once a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trtx.checkpoint.experts import ExpertConfig
from trtx.torch_engine.step import ExpertBalance

_READ_EVERY_S = 1.0
_COUNTER = 1 << 32  # the device's counters are int32 and wrap around


@dataclass(slots=True, eq=False)
class RoutedRows:
    """The rows of the current forward. Rows of the padding slot do not count."""

    padding_slot: int
    slots: Tensor | None = None  # [n] int32; None: no forward has begun


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """The counters of one layer."""

    tokens: Tensor  # [experts] int32
    rows: RoutedRows

    def count(self, experts: Tensor) -> None:
        """Adds the ``experts`` [n, per_token] of each row of the forward."""
        if self.rows.slots is None:
            return
        routed = experts[self.rows.slots != self.rows.padding_slot]
        self.tokens.add_(routed.flatten().bincount(minlength=self.tokens.shape[0]))


class ExpertLoad:
    """The counters of all layers with experts."""

    def __init__(
        self, experts: ExpertConfig, device: torch.device, *, padding_slot: int, expert_ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """``expert_ranks``: number of ranks that split the experts."""
        self._layers = {layer: index for index, layer in enumerate(_sparse_layers(experts))}
        self._tokens = torch.zeros(len(self._layers), experts.count, dtype=torch.int32, device=device)
        self._rows = RoutedRows(padding_slot)
        self._expert_ranks = expert_ranks
        self._clock = clock
        self._read_at = clock()
        self._seen = torch.zeros(self._tokens.shape, dtype=torch.int64)
        self._total = 0
        self.balance: ExpertBalance | None = None

    def layer(self, layer: int) -> LayerLoad:
        return LayerLoad(self._tokens[self._layers[layer]], self._rows)

    def begin(self, slots: Tensor) -> None:
        """Announces a forward, with the slot of each row."""
        self._rows.slots = slots

    def select(self, rows: Tensor | None) -> None:
        """Announces that the layers to come compute only these rows of the forward; None: all."""
        if rows is not None and self._rows.slots is not None:
            self._rows.slots = self._rows.slots.index_select(0, rows)

    def read(self) -> Callable[[], None] | None:
        """Starts to copy the counts to the host, if they are due.

        Returns a function that updates ``balance``. Call it once the device has done the work of this step.
        """
        if self._clock() - self._read_at < _READ_EVERY_S:
            return None
        self._read_at = self._clock()
        if self._tokens.device.type == "cpu":
            copied = self._tokens.clone()
        else:
            copied = torch.empty(self._tokens.shape, dtype=torch.int32, pin_memory=True)
            copied.copy_(self._tokens, non_blocking=True)
        return lambda: self._update(copied)

    def _update(self, copied: Tensor) -> None:
        counts = copied.to(torch.int64)
        recent, self._seen = (counts - self._seen) % _COUNTER, counts
        self._total += int(recent.sum())
        routed = recent[recent.sum(1) > 0].double()
        if not len(routed):
            return
        by_rank = routed.view(len(routed), self._expert_ranks, -1).sum(2)
        self.balance = ExpertBalance(
            tokens=self._total,
            busiest_expert=_imbalance(routed),
            busiest_rank=_imbalance(by_rank) if self._expert_ranks > 1 else None,
        )


def _sparse_layers(experts: ExpertConfig) -> list[int]:
    return [layer for layer, is_sparse in enumerate(experts.sparse) if is_sparse]


def _imbalance(counts: Tensor) -> float:
    """Returns the ratio of each row's largest value to the row's mean, averaged over the rows."""
    return float((counts.amax(1) / counts.mean(1)).mean())
