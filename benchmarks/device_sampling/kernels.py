"""Triton kernels that sample as :mod:`definition` says, token for token.

A row's logits are read once (:func:`summaries_kernel`): the largest of every group of 64 tokens, and the weights of
every part of 4,096. The 128 groups with the largest maxima hold every logit not below the least of those maxima, so
top-k of few tokens and top-p of a peaked distribution are found among them (:func:`choose_kernel`), in registers;
what is not, in passes over the row (:mod:`search`).
"""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from device_sampling.arithmetic import (
    EDITS,
    FIELDS,
    GROUP,
    HAS_TOP_P,
    IS_SAMPLED,
    LOWEST_KEY,
    MIN_WEIGHT,
    MODE,
    MOST_GROUPS,
    NO_TOKEN,
    PART,
    SCALE,
    TOP_K,
    UNDECIDED,
    bits_as_float,
    edited_best,
    first_beyond,
    kept_weights,
    keys_of,
    least_key_of_top_p,
    load_logits,
    row_best,
    shift_of,
    ties_of_top_p,
    top_p_limit,
    value_of,
    wanted_of,
    weights_of,
)
from device_sampling.search import search_kernel
from torch import Tensor


@triton.jit
def edited_best_kernel(logits, slots, rows, part_best, part_token, vocab, parts):
    """The largest logit after edits of each part of a row, and its token: of rows with edits alone."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    row_params = rows + tl.load(slots + row).to(tl.int64) * FIELDS
    if tl.load(row_params + EDITS) == 0:
        return
    ids = part * PART + tl.arange(0, PART)
    values = load_logits(logits + row.to(tl.int64) * vocab, row_params, ids, ids < vocab)
    best = tl.max(values, axis=0)
    tl.store(part_best + row * parts + part, best)
    tl.store(part_token + row * parts + part, tl.min(tl.where(values == best, ids, 2147483647), axis=0))


@triton.jit
def summaries_kernel(
    logits, tokens, slots, rows, part_best, part_token, group_keys, part_weights, vocab, groups, parts,
    PARTS: tl.constexpr, IS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """The largest key of each group, and the sum of each part's weights, as far as a row's parameters need them."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    row_params = rows + tl.load(slots + row).to(tl.int64) * FIELDS
    greedy = tl.load(tokens + row)
    mode = tl.load(row_params + MODE)
    if ((mode & IS_SAMPLED) == 0) | (greedy == NO_TOKEN):
        return
    row_logits = logits + row.to(tl.int64) * vocab
    top_k = tl.load(row_params + TOP_K)
    has_top_p = (mode & HAS_TOP_P) != 0
    GROUPS: tl.constexpr = PART // GROUP
    group = part * GROUPS + tl.arange(0, GROUPS)
    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = load_logits(row_logits, row_params, ids, ids < vocab)
    if (top_k > 0) | has_top_p:
        keys = tl.max(keys_of(values, shift_of(row_params, IS_BFLOAT16)), axis=1)
        tl.store(group_keys + row * groups + group, keys, mask=group < groups)
    if top_k == 0:
        best = row_best(row_logits, row_params, greedy, part_best, part_token, row, parts, PARTS)
        found = weights_of(values, best, bits_as_float(tl.load(row_params + SCALE)))
        floor = tl.where(has_top_p, 0, tl.load(row_params + MIN_WEIGHT))
        found = tl.where(found >= floor, found, 0)
        tl.store(part_weights + row * parts + part, tl.sum(tl.sum(found, axis=1), axis=0))


@triton.jit
def _choose_unrestricted(row_logits, row_params, index, best, sums, vocab, PARTS: tl.constexpr):
    """By the sums of the parts' weights, then within one part."""
    at_part = tl.arange(0, PARTS)
    wanted = wanted_of(row_params, index, tl.sum(sums, axis=0))
    part = tl.min(tl.where(tl.cumsum(sums, axis=0) > wanted, at_part, PARTS), axis=0)
    wanted -= tl.sum(tl.where(at_part < part, sums, 0), axis=0)
    ids = part * PART + tl.arange(0, PART)
    values = load_logits(row_logits, row_params, ids, ids < vocab)
    found = weights_of(values, best, bits_as_float(tl.load(row_params + SCALE)))
    found = tl.where((found >= tl.load(row_params + MIN_WEIGHT)) & (ids < vocab), found, 0)
    return first_beyond(found, ids, wanted)


@triton.jit
def _choose_restricted(
    row_logits, row_params, index, best, sums, maxima, chosen_groups, vocab, groups,
    GROUPS: tl.constexpr, IS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """(token, whether it is one): among the groups with the largest maxima."""
    scale = bits_as_float(tl.load(row_params + SCALE))
    top_k = tl.load(row_params + TOP_K).to(tl.int32)
    has_top_p = (tl.load(row_params + MODE) & HAS_TOP_P) != 0
    shift = shift_of(row_params, IS_BFLOAT16)
    top = keys_of(best, shift)
    # All groups whose maximum reaches `least`, which is as low as MOST_GROUPS allow.
    at_group = tl.arange(0, GROUPS)
    is_group = at_group < groups
    least = top + 1
    below = tl.min(tl.where(is_group, maxima, top), axis=0) - 1
    if groups <= MOST_GROUPS:
        least = below + 1
    while below + 1 < least:
        middle = (least & below) + ((least ^ below) >> 1)
        fits = tl.sum((is_group & (maxima >= middle)).to(tl.int32), axis=0) <= MOST_GROUPS
        least = tl.where(fits, middle, least)
        below = tl.where(fits, below, middle)
    is_chosen = is_group & (maxima >= least)
    place = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    chosen = tl.sum(is_chosen.to(tl.int32), axis=0)
    tl.store(chosen_groups + place, at_group, mask=is_chosen)
    tl.debug_barrier()  # other threads of this program read them

    at = tl.arange(0, MOST_GROUPS * GROUP)
    group = tl.load(chosen_groups + at // GROUP, mask=at // GROUP < chosen, other=groups)
    ids = group * GROUP + at % GROUP
    inside = ids < vocab
    values = load_logits(row_logits, row_params, ids, inside)
    keys = keys_of(values, shift)
    keys = tl.where(inside & (keys >= least), keys, LOWEST_KEY)
    found = tl.where(keys > LOWEST_KEY, weights_of(values, best, scale), 0)

    low = least
    ties = top_k * 0 + 2147483647
    high = top + 1
    above = tl.sum(found, axis=0) * 0
    is_decided = top_k >= 0
    if top_k > 0:
        is_decided = tl.sum((keys > LOWEST_KEY).to(tl.int32), axis=0) >= top_k
        while low + 1 < high:
            middle = (low & high) + ((low ^ high) >> 1)
            enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        ties = top_k - tl.sum((keys > low).to(tl.int32), axis=0)
    if has_top_p:
        above = tl.sum(tl.where(keys > low, found, 0), axis=0)
        total = above + ties * weights_of(value_of(low, shift), best, scale)
        if top_k == 0:
            total = tl.sum(sums, axis=0)
        limit = top_p_limit(row_params, total)
        is_decided = is_decided & ((top_k > 0) | (tl.sum(found, axis=0) >= limit))
        if (top_k == 0) | (above >= limit):
            low, above = least_key_of_top_p(keys, found, low, top + 1, limit)
            ties = top_k * 0 + 2147483647
        ties = ties_of_top_p(limit, above, low, shift, best, scale, ties)
    kept, _ = kept_weights(values, keys, low, ties, best, scale, tl.load(row_params + MIN_WEIGHT))
    wanted = wanted_of(row_params, index, tl.sum(kept, axis=0))
    return first_beyond(kept, ids, wanted), is_decided


@triton.jit
def choose_kernel(
    logits, tokens, slots, indices, rows, part_best, part_token, group_keys, part_weights, chosen_groups,
    vocab, groups, parts, PARTS: tl.constexpr, GROUPS: tl.constexpr, IS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """A row's token in place of the greedy one; ``UNDECIDED`` less that if the largest groups do not tell."""
    row = tl.program_id(0)
    row_params = rows + tl.load(slots + row).to(tl.int64) * FIELDS
    greedy = tl.load(tokens + row)
    mode = tl.load(row_params + MODE)
    is_sampled = (mode & IS_SAMPLED) != 0
    has_edits = tl.load(row_params + EDITS) != 0
    if (greedy == NO_TOKEN) | ((is_sampled | has_edits) == 0):
        return
    row_logits = logits + row.to(tl.int64) * vocab
    best = tl.load(row_logits + greedy).to(tl.float32)
    if has_edits:
        best, token = edited_best(part_best, part_token, row, parts, PARTS)
        excludes_all = best == -float("inf")
        is_sampled = is_sampled & (excludes_all == 0)
        tl.store(tokens + row, tl.where(excludes_all, NO_TOKEN, token).to(tl.int64))
    if is_sampled:
        index = tl.load(indices + row)
        at_part = tl.arange(0, PARTS)
        sums = tl.load(part_weights + row * parts + at_part, mask=at_part < parts, other=0)
        if (tl.load(row_params + TOP_K) == 0) & ((mode & HAS_TOP_P) == 0):
            token = _choose_unrestricted(row_logits, row_params, index, best, sums, vocab, PARTS)
            tl.store(tokens + row, token.to(tl.int64))
        else:
            at_group = tl.arange(0, GROUPS)
            maxima = tl.load(group_keys + row * groups + at_group, mask=at_group < groups, other=LOWEST_KEY)
            token, is_decided = _choose_restricted(
                row_logits, row_params, index, best, sums, maxima, chosen_groups + row * MOST_GROUPS, vocab,
                groups, GROUPS, IS_BFLOAT16,
            )  # fmt: skip
            tl.store(tokens + row, tl.where(is_decided, token.to(tl.int64), UNDECIDED - greedy))


@triton.jit
def count_kernel(tokens, slots, rows):
    """One more of its token in each row's edits."""
    row = tl.program_id(0)
    address = tl.load(rows + tl.load(slots + row).to(tl.int64) * FIELDS + EDITS)
    token = tl.load(tokens + row)
    if (address != 0) & (token >= 0):
        count = address.to(tl.pointer_type(tl.int32)) + token
        tl.store(count, tl.load(count) + 1)


class TritonSampling:
    """Launches of the kernels, behind a graph or not: nothing is waited for, and what a batch does not need is not
    launched."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._groups = triton.cdiv(vocab_size, GROUP.value)
        self._parts = triton.cdiv(vocab_size, PART.value)
        self._part_best = torch.empty(max_rows, self._parts, dtype=torch.float32, device=device)
        self._part_token = torch.empty(max_rows, self._parts, dtype=torch.int32, device=device)
        self._part_weights = torch.empty(max_rows, self._parts, dtype=torch.int64, device=device)
        self._group_keys = torch.empty(max_rows, self._groups, dtype=torch.int32, device=device)
        self._chosen_groups = torch.empty(max_rows, MOST_GROUPS.value, dtype=torch.int32, device=device)

    def replace_tokens(
        self, tokens: Tensor, logits: Tensor, slots: Tensor, indices: Tensor, rows: Tensor,
        *, has_edits: bool, is_sampled: bool, is_restricted: bool,
    ) -> None:  # fmt: skip
        """Replaces the greedy ``tokens`` [n] int64 of ``logits`` [n, vocab] where ``rows`` [slots, FIELDS] says so.

        ``indices`` [n] int32: of each row's random number. The last three: what any row of the batch asks for.
        """
        count = logits.shape[0]
        common = {
            "PARTS": triton.next_power_of_2(self._parts),
            "IS_BFLOAT16": logits.dtype == torch.bfloat16,
            "enable_fp_fusion": False,
        }
        best = (self._part_best, self._part_token)
        if has_edits:
            edited_best_kernel[(count, self._parts)](
                logits, slots, rows, *best, self._vocab, self._parts, num_warps=4, enable_fp_fusion=False
            )
        if is_sampled:
            summaries_kernel[(count, self._parts)](
                logits, tokens, slots, rows, *best, self._group_keys, self._part_weights, self._vocab, self._groups,
                self._parts, **common, num_warps=4,
            )  # fmt: skip
        choose_kernel[(count,)](
            logits, tokens, slots, indices, rows, *best, self._group_keys, self._part_weights, self._chosen_groups,
            self._vocab, self._groups, self._parts, **common, GROUPS=triton.next_power_of_2(self._groups),
            num_warps=8,
        )  # fmt: skip
        if is_restricted:
            search_kernel[(count,)](
                logits, tokens, slots, indices, rows, *best, self._part_weights, self._vocab, self._parts, **common,
                num_warps=8,
            )  # fmt: skip
        if has_edits:
            count_kernel[(count,)](tokens, slots, rows, num_warps=1)
