"""Attention for towers that attend within windows and images: one call for all sequences of the same length.

transformers calls its "sdpa" attention once for each sequence (5.17 and 5.23, ``Qwen2_5_VLVisionAttention``). An image
of one megapixel has 81 windows in each of 28 layers, and a GPU waits for their launches five times as long as it
computes. An attention with "flash" in its name gets all sequences at once with their borders, and any registered
function may have such a name.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

_NAME = "trtx_flash_by_length"
_KEPT = 4  # borders kept: of windows and of images, for this batch and the one before


def attend_by_length(model: PreTrainedModel) -> None:
    """Makes :func:`_attend` the attention of a tower whose layers pass borders."""
    AttentionInterface.register(_NAME, _attend)
    model.config._attn_implementation = _NAME  # the only way that does not require a flash attention package


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of one length. ``rows``: their tokens, sequence by sequence; None: all tokens in their order."""

    length: int
    rows: Tensor | None


class _Groups:
    """Cache of groups by borders, which all layers of a batch share."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, list[_Group]]] = []

    def of(self, borders: Tensor) -> list[_Group]:
        """Returns the groups of the sequences between ``borders`` [sequences + 1], which are their starts and the last
        end.

        Waits for the device once for each new tensor of borders.
        """
        for known, groups in self._kept:
            if known is borders:
                return groups
        ends = borders.tolist()
        starts_of: dict[int, list[int]] = defaultdict(list)
        for begin, end in pairwise(ends):
            if end > begin:
                starts_of[end - begin].append(begin)
        if len(starts_of) == 1:
            groups = [_Group(length, None) for length in starts_of]
        else:
            groups = [
                _Group(length, (torch.tensor(starts)[:, None] + torch.arange(length)).flatten().to(borders.device))
                for length, starts in starts_of.items()
            ]
        self._kept = [*self._kept[1 - _KEPT :], (borders, groups)]
        return groups


_groups = _Groups()


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *,
    scaling: float, cu_seq_lens_q: Tensor, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """``query``, ``key``, ``value``: ``[1, heads, tokens, dim]``.

    Returns ``[1, tokens, heads, dim]`` and no weights.
    """
    inputs = [each[0].transpose(0, 1) for each in (query, key, value)]  # [tokens, heads, dim]
    out = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
    for group in _groups.of(cu_seq_lens_q):
        parts = (each if group.rows is None else each.index_select(0, group.rows) for each in inputs)
        q, k, v = (part.reshape(-1, group.length, *part.shape[1:]).transpose(1, 2) for part in parts)
        found = scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1)
        if group.rows is None:
            return found[None], None
        out.index_copy_(0, group.rows, found)
    return out[None], None
