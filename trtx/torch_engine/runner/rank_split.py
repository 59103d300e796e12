"""Tensor and expert parallelism: the share of a model that one rank computes, and where the ranks combine partial
results.

Each rank has some of the attention heads, of the MLP's columns, of the experts and of the vocabulary. A matmul that
reads a split input gives a partial sum. The ranks add up their partial sums after the attention's output projection and
after the MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from trtx.checkpoint.dense import HEAD, checkpoint_tensors
from trtx.checkpoint.experts import is_expert
from trtx.checkpoint.model_config import ModelConfig
from trtx.checkpoint.tensor_parallel import RankSizes, rank_config
from trtx.torch_engine.runner.linear import Linear, Multiplier
from trtx.torch_engine.runner.mlp import ExpertBackend, ExpertWeights, GatedActivation


class RankGroup(Protocol):
    """The ranks of one engine. Every rank calls the same methods in the same order, on the stream of its forward."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def add(self, partial: Tensor) -> Tensor:
        """Returns the sum of the ranks' ``partial``, the same bits on each rank. May overwrite ``partial``."""

    def join(self, part: Tensor) -> Tensor:
        """Returns the parts ``[n, columns]`` of all ranks side by side: ``[n, size * columns]``."""

    def share(self, value: Tensor) -> None:
        """Overwrites ``value`` with that of rank 0."""

    def smallest(self, number: int) -> int:
        """Returns the smallest of the ranks' numbers."""


@dataclass(frozen=True, slots=True)
class RankSplit:
    """One rank's share of a model."""

    group: RankGroup
    whole: ModelConfig
    sizes: RankSizes

    @property
    def config(self) -> ModelConfig:
        """The shape of the share, as if it were a model. The vocabulary and the hidden size are those of the whole
        model.
        """
        return rank_config(self.whole, self.sizes, self.group.rank)

    def share(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's share of each of the checkpoint's tensors, one at a time.

        A tensor is split in the dimensions in which the shapes of model and share differ. If there are more ranks than
        KV heads, several ranks have the same head. The weights of other ranks' experts are left out.
        """
        shares = checkpoint_tensors(self.config)
        for name, tensor in tensors:
            if name not in shares:
                continue
            of_expert = is_expert(name)
            ways = self.sizes.expert_columns if of_expert else self.group.size
            part = self.sizes.expert_part(self.group.rank) if of_expert else self.group.rank
            share = self.head(tensor) if name == HEAD else tensor
            for dimension, length in enumerate(shares[name].shape):
                parts = share.shape[dimension] // length
                if parts > 1:
                    share = share.narrow(dimension, part * parts // ways * length, length)
            is_partial = name.endswith("o_proj.bias") and self.group.rank
            if is_partial or (of_expert and name.endswith("down_proj.bias") and part):
                share = share.new_zeros(share.shape)  # it is added once, by the first rank of those that add up
            yield name, share if share is tensor else share.clone()

    def head(self, head: Tensor) -> Tensor:
        """Returns this rank's rows of the head ``[vocab, hidden]``; the last rank's are padded with zeros."""
        rows = -(-head.shape[0] // self.group.size)
        own = head[self.group.rank * rows : (self.group.rank + 1) * rows]
        return own if own.shape[0] == rows else F.pad(own, (0, 0, 0, rows - own.shape[0]))

    def summed(self, linear: Linear) -> SummedLinear:
        return SummedLinear(linear, self.group)

    def summed_experts(self, experts: ExpertBackend) -> SummedExperts:
        return SummedExperts(experts, self.group)


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """A :class:`trtx.torch_engine.runner.linear.Linear` whose ranks each have some columns of the weight."""

    partial: Linear
    group: RankGroup

    @property
    def input_scale(self) -> Tensor | None:
        return self.partial.input_scale

    def admit(self) -> None:
        self.partial.admit()

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.add(self.partial(x))


@dataclass(frozen=True, slots=True)
class SummedExperts:
    """An :class:`trtx.torch_engine.runner.mlp.ExpertBackend` whose ranks have experts or columns of their own."""

    partial: ExpertBackend
    group: RankGroup

    def admit(self, weights: ExpertWeights) -> None:
        self.partial.admit(weights)

    def __call__(self, x: Tensor, weights: ExpertWeights, kernels: GatedActivation) -> Tensor:
        return self.group.add(self.partial(x, weights, kernels))

    def added(self, x: Tensor, weights: ExpertWeights, kernels: GatedActivation, residual: Tensor) -> Tensor:
        if self.group.rank:
            return self(x, weights, kernels)
        return self.group.add(self.partial.added(x, weights, kernels, residual))


@dataclass(frozen=True, slots=True)
class VocabularyMultiplier:
    """The GEMM backend of an LM head whose rows the ranks split: see :meth:`RankSplit.head`."""

    partial: Multiplier
    group: RankGroup
    vocab_size: int

    def admit(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.partial.admit(weight, bias)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        logits = self.group.join(self.partial(x, weight, bias))[:, : self.vocab_size]
        return logits.contiguous() if out is None else out.copy_(logits)


def without_sum(linear: Linear) -> Linear:
    """Returns the matmul that gives this rank's partial sum."""
    return linear.partial if isinstance(linear, SummedLinear) else linear
