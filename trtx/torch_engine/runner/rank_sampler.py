"""Sampling with several ranks: rank 0 samples, and the others learn the tokens on the device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from trtx.torch_engine.runner.rank_split import RankGroup
from trtx.torch_engine.runner.sampler import SampledRows, Sampler
from trtx.torch_engine.runner.sampling.masks import TokenMasks
from trtx.torch_engine.step import ScheduledSequence


class LeadingSampler(Sampler):
    """Rank 0's sampler. Shares each slot's last token after every call of :meth:`sample`."""

    def __init__(
        self, max_batch_size: int, vocab_size: int, device: torch.device, group: RankGroup, *,
        counts_prompts: bool = False, masks: TokenMasks | None = None,
    ) -> None:  # fmt: skip
        super().__init__(max_batch_size, vocab_size, device, counts_prompts=counts_prompts, masks=masks)
        self._group = group

    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, out: Tensor | None = None, place: int = 0
    ) -> Tensor:
        tokens = super().sample(logits, slots, positions, out, place)
        self._group.share(self._slots.last_tokens)
        return tokens


class FollowingSampler(LeadingSampler):
    """The sampler of any other rank. It knows no sampling parameters; its results are not for a client."""

    def update(self, sequences: list[ScheduledSequence]) -> None:
        return None

    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, out: Tensor | None = None, place: int = 0
    ) -> Tensor:
        self._group.share(self._slots.last_tokens)
        tokens = self._slots.last_tokens[slots.long()].long()
        return tokens if out is None else out.copy_(tokens)

    def own_logits(self, logits: Tensor, sequences: list[ScheduledSequence]) -> dict[int, Tensor]:
        return {}

    def collect(
        self, logits: Tensor, tokens: Tensor, sequences: list[ScheduledSequence],
        own_logits: Mapping[int, Tensor] = MappingProxyType({}), *, place: int = 0,
    ) -> SampledRows:  # fmt: skip
        return SampledRows(tokens, sequences, place)
