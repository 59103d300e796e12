"""Launches the sampling kernels."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from trtx.torch_engine.runner.sampling.masks import TokenMasks
from trtx.torch_engine.runner.sampling.triton_arithmetic import PART
from trtx.torch_engine.runner.sampling.triton_draw import (
    GROUP,
    KINDS_OF_SUMS,
    MOST_GROUPS,
    check_kernel,
    choose_kernel,
    edit_kernel,
    retry_kernel,
    summaries_kernel,
    weights_kernel,
)
from trtx.torch_engine.runner.sampling.triton_last_tokens import fill_kernel
from trtx.torch_engine.runner.sampling.triton_masks import mask_kernel
from trtx.torch_engine.runner.sampling.triton_search import search_kernel

_EDITING = 8  # programs for each row: few, as most rows need none


class TritonSampling:
    """Launches all kernels for every batch; a program returns at once if its row does not need it.

    So a CUDA graph of the launches serves any batch, and each kernel compiles once for each dtype of logits.
    """

    def __init__(self, rows: Tensor, last_tokens: Tensor, vocab_size: int, masks: TokenMasks | None = None) -> None:
        """``rows`` [slots, FIELDS] and ``last_tokens`` [slots] int32 belong to
        :class:`trtx.torch_engine.runner.sampling.slots.SamplingSlots`. ``masks`` None: no guided decoding.
        """
        self._masks = masks
        self._rows = rows
        self._last_tokens = last_tokens
        self._vocab = vocab_size
        self._groups = triton.cdiv(vocab_size, GROUP.value)
        self._parts = triton.cdiv(vocab_size, PART.value)
        self._most_parts = triton.next_power_of_2(self._parts)
        most, device = rows.shape[0], rows.device
        self._states = torch.zeros(most, dtype=torch.int32, device=device)
        self._part_best = torch.empty(most, self._parts, dtype=torch.float32, device=device)
        self._sums = torch.empty(most, KINDS_OF_SUMS.value, self._most_parts, dtype=torch.int64, device=device)
        self._group_keys = torch.empty(most, self._groups, dtype=torch.int32, device=device)
        self._chosen_groups = torch.empty(most, MOST_GROUPS.value, dtype=torch.int32, device=device)

    def fill(self, token_ids: Tensor, slots: Tensor) -> Tensor:
        """See :meth:`trtx.torch_engine.runner.sampler.Sampler.fill`."""
        filled = torch.empty(token_ids.shape[0], dtype=torch.int32, device=token_ids.device)
        fill_kernel[(token_ids.shape[0],)](token_ids, slots, self._last_tokens, filled, num_warps=1)
        return filled

    def sample(self, tokens: Tensor, logits: Tensor, slots: Tensor, positions: Tensor, place: int = 0) -> None:
        """Samples ``tokens`` [n] int64 from ``logits`` [n, vocab], and counts them in their rows' edits.

        Overwrites the logits of tokens that the masks exclude. The tokens become their slots' last tokens. ``slots``
        [n] int32: each row's place in ``rows``. ``positions`` [n] int32: positions of the tokens that the logits
        follow. ``place``: see :meth:`trtx.torch_engine.runner.sampler.Sampler.sample`. Does not wait for the device.
        """
        count = logits.shape[0]
        vocab, groups, parts = self._vocab, self._groups, self._parts
        is_bfloat16, most_parts = logits.dtype == torch.bfloat16, self._most_parts
        best, sums, states = self._part_best, self._sums, self._states
        most_groups = triton.next_power_of_2(groups)
        if (masks := self._masks) is not None:
            mask_kernel[(count, _EDITING)](
                logits, slots, masks.rows, masks.on_device, place, vocab, masks.on_device.shape[1], parts,
                PROGRAMS=_EDITING, num_warps=8,
            )  # fmt: skip
        edit_kernel[(count, _EDITING)](
            logits, slots, self._rows, vocab, parts, PROGRAMS=_EDITING, num_warps=8, enable_fp_fusion=False
        )
        summaries_kernel[(count, parts)](
            logits, slots, self._rows, best, self._group_keys, vocab, groups, parts,
            IS_BFLOAT16=is_bfloat16, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        weights_kernel[(count, parts)](
            logits, slots, self._rows, best, sums, vocab, parts, PARTS=most_parts, num_warps=4, enable_fp_fusion=False
        )
        choose_kernel[(count,)](
            logits, tokens, states, slots, positions, self._rows, best, self._group_keys, sums, self._chosen_groups,
            vocab, groups, parts, PARTS=most_parts, GROUPS=most_groups, IS_BFLOAT16=is_bfloat16,
            num_warps=16, enable_fp_fusion=False,
        )  # fmt: skip
        self._check(tokens, logits, slots)
        retry_kernel[(count,)](
            logits, tokens, states, slots, positions, self._rows, best, sums, vocab, parts, PARTS=most_parts,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        self._check(tokens, logits, slots)
        search_kernel[(count,)](
            logits, tokens, states, slots, positions, self._rows, best, self._group_keys, sums, self._last_tokens,
            vocab, groups, parts, PARTS=most_parts, GROUPS=most_groups, IS_BFLOAT16=is_bfloat16, num_warps=16,
            enable_fp_fusion=False,
        )  # fmt: skip

    def _check(self, tokens: Tensor, logits: Tensor, slots: Tensor) -> None:
        check_kernel[(logits.shape[0], self._parts)](
            logits, tokens, self._states, slots, self._rows, self._part_best, self._sums, self._vocab, self._parts,
            PARTS=self._most_parts, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
