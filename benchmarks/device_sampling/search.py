"""The kernel for rows that the largest groups do not decide: passes over the row, each narrowing the limit's key."""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from device_sampling.arithmetic import (
    FIELDS,
    HAS_TOP_P,
    LOWEST_KEY,
    MIN_WEIGHT,
    MODE,
    PART,
    SCALE,
    TOP_K,
    UNDECIDED,
    bits_as_float,
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


@triton.jit
def _chunk(row_logits, row_params, begin, vocab, shift):
    ids = begin + tl.arange(0, PART)
    values = load_logits(row_logits, row_params, ids, ids < vocab)
    return ids, values, tl.where(ids < vocab, keys_of(values, shift), LOWEST_KEY)


@triton.jit
def _pass_of_counts(row_logits, row_params, first, second, third, vocab, shift):
    """How many tokens are not below each of three keys."""
    at_first = tl.zeros((), tl.int64)
    at_second = tl.zeros((), tl.int64)
    at_third = tl.zeros((), tl.int64)
    for begin in range(0, vocab, PART):
        _, _, keys = _chunk(row_logits, row_params, begin, vocab, shift)
        at_first += tl.sum((keys >= first).to(tl.int32), axis=0)
        at_second += tl.sum((keys >= second).to(tl.int32), axis=0)
        at_third += tl.sum((keys >= third).to(tl.int32), axis=0)
    return at_first, at_second, at_third


@triton.jit
def _pass_of_weights(row_logits, row_params, best, first, second, third, vocab, shift):
    """What the tokens weigh that are not below each of three keys."""
    scale = bits_as_float(tl.load(row_params + SCALE))
    at_first = tl.zeros((), tl.int64)
    at_second = tl.zeros((), tl.int64)
    at_third = tl.zeros((), tl.int64)
    for begin in range(0, vocab, PART):
        _, values, keys = _chunk(row_logits, row_params, begin, vocab, shift)
        found = weights_of(values, best, scale)
        at_first += tl.sum(tl.where(keys >= first, found, 0), axis=0)
        at_second += tl.sum(tl.where(keys >= second, found, 0), axis=0)
        at_third += tl.sum(tl.where(keys >= third, found, 0), axis=0)
    return at_first, at_second, at_third


@triton.jit
def _narrowed(low, high, at_high, limit, first, second, third, at_first, at_second, at_third):
    """(low, high, what is not below high) after a pass over three ascending keys between."""
    new_low = tl.where(at_third >= limit, third, tl.where(at_second >= limit, second,
                       tl.where(at_first >= limit, first, low)))  # fmt: skip
    new_high = tl.where(at_third >= limit, high, tl.where(at_second >= limit, third,
                        tl.where(at_first >= limit, second, first)))  # fmt: skip
    above = tl.where(at_third >= limit, at_high, tl.where(at_second >= limit, at_third,
                     tl.where(at_first >= limit, at_second, at_first)))  # fmt: skip
    return new_low, new_high, above


@triton.jit
def _quarters(low, high):
    """Three ascending keys above ``low`` and below ``high``, which are at least 2 apart."""
    span = high.to(tl.int64) - low.to(tl.int64)
    first = (low + tl.maximum(span // 4, 1)).to(tl.int32)
    second = (low + tl.maximum(span // 2, 1)).to(tl.int32)
    third = (low + tl.maximum(span * 3 // 4, 1)).to(tl.int32)
    return first, second, third


@triton.jit
def _search_top_k(row_logits, row_params, low, high, top_k, vocab, shift):
    """The largest key that ``top_k`` tokens are not below, as they are not below ``low``; how many are above it."""
    above = top_k * 0
    while low + 1 < high:
        first, second, third = _quarters(low, high)
        n1, n2, n3 = _pass_of_counts(row_logits, row_params, first, second, third, vocab, shift)
        low, high, above = _narrowed(low, high, above, top_k, first, second, third, n1, n2, n3)
    return low, above


@triton.jit
def _search_top_p(row_logits, row_params, best, low, high, total, limit, vocab, shift):
    """The largest key such that tokens not below it weigh ``limit``, as those not below ``low`` do, which weigh
    ``total``; what those above it weigh.

    A sample of the row says where to begin, then the weights at both ends of what remains: any keys would do, the
    nearer the fewer passes. Every second pass tries quarters, so that none of that can go wrong for long.
    """
    scale = bits_as_float(tl.load(row_params + SCALE))
    ids = tl.arange(0, PART) * tl.cdiv(vocab, PART)
    values = load_logits(row_logits, row_params, ids, ids < vocab)
    keys = tl.where(ids < vocab, keys_of(values, shift), LOWEST_KEY)
    found = tl.where(ids < vocab, weights_of(values, best, scale), 0)
    share = tl.sum(found, axis=0).to(tl.float32) / total.to(tl.float32)
    wanted = limit.to(tl.float32) * share
    margin = total.to(tl.float32) * share * 0.012
    first, _ = least_key_of_top_p(keys, found, low, high, (wanted + margin).to(tl.int64))
    third, _ = least_key_of_top_p(keys, found, low, high, tl.maximum(wanted - margin, 1.0).to(tl.int64))
    first = tl.minimum(tl.maximum(first, low + 1), high - 1)
    third = tl.minimum(tl.maximum(third, first), high - 1)
    second = (first & third) + ((first ^ third) >> 1)
    above = limit * 0
    at_low = total
    by_value = limit < 0
    while low + 1 < high:
        a, b, c = _pass_of_weights(row_logits, row_params, best, first, second, third, vocab, shift)
        at_low = tl.where(c >= limit, c, tl.where(b >= limit, b, tl.where(a >= limit, a, at_low)))
        low, high, above = _narrowed(low, high, above, limit, first, second, third, a, b, c)
        if low + 1 < high:
            first, second, third = _quarters(low, high)
            by_value = by_value == 0
            if by_value:
                # As if weight were spread evenly over the values between: an eighth to either side of that.
                bottom = value_of(low, shift)
                width = value_of(high, shift) - bottom
                part = (at_low - limit).to(tl.float32) / tl.maximum((at_low - above).to(tl.float32), 1.0)
                if (width < float("inf")) & (bottom > -float("inf")):
                    second = keys_of(bottom + width * part, shift)
                    first = keys_of(bottom + width * (part - 0.125), shift)
                    third = keys_of(bottom + width * (part + 0.125), shift)
                    first = tl.minimum(tl.maximum(first, low + 1), high - 1)
                    second = tl.minimum(tl.maximum(second, first), high - 1)
                    third = tl.minimum(tl.maximum(third, second), high - 1)
    return low, above


@triton.jit
def search_kernel(
    logits, tokens, slots, indices, rows, part_best, part_token, part_weights, vocab, parts,
    PARTS: tl.constexpr, IS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """Rows that :func:`choose_kernel` left undecided, in passes over the row. One row a program."""
    row = tl.program_id(0)
    greedy = UNDECIDED - tl.load(tokens + row)
    if greedy < 0:
        return
    row_params = rows + tl.load(slots + row).to(tl.int64) * FIELDS
    row_logits = logits + row.to(tl.int64) * vocab
    best = row_best(row_logits, row_params, greedy, part_best, part_token, row, parts, PARTS)
    scale = bits_as_float(tl.load(row_params + SCALE))
    top_k = tl.load(row_params + TOP_K)
    floor = tl.load(row_params + MIN_WEIGHT)
    shift = shift_of(row_params, IS_BFLOAT16)
    top = keys_of(best, shift)
    low = keys_of(best * 0 - float("inf"), shift)
    ties = top_k * 0 + 2147483647
    above = top_k * 0
    if top_k > 0:
        low, above = _search_top_k(row_logits, row_params, low, top + 1, top_k, vocab, shift)
        ties = top_k - above
    has_top_p = (tl.load(row_params + MODE) & HAS_TOP_P) != 0
    total = top_k * 0
    if has_top_p:
        above = top_k * 0
        if top_k > 0:
            for begin in range(0, vocab, PART):
                _, values, keys = _chunk(row_logits, row_params, begin, vocab, shift)
                above += tl.sum(tl.where(keys > low, weights_of(values, best, scale), 0), axis=0)
            total = above + ties * weights_of(value_of(low, shift), best, scale)
        else:
            at_part = tl.arange(0, PARTS)
            total = tl.sum(tl.load(part_weights + row * parts + at_part, mask=at_part < parts, other=0), axis=0)
        limit = top_p_limit(row_params, total)
        if (top_k == 0) | (above >= limit):
            low, above = _search_top_p(row_logits, row_params, best, low, top + 1, total, limit, vocab, shift)
            ties = top_k * 0 + 2147483647
        ties = ties_of_top_p(limit, above, low, shift, best, scale, ties).to(tl.int64)
    if has_top_p & (floor == 0):
        total = above + ties * weights_of(value_of(low, shift), best, scale)
    else:
        total = top_k * 0
        left = ties
        for begin in range(0, vocab, PART):
            _, values, keys = _chunk(row_logits, row_params, begin, vocab, shift)
            kept, equal = kept_weights(values, keys, low, left, best, scale, floor)
            total += tl.sum(kept, axis=0)
            left = tl.maximum(left - equal, 0)
    wanted = wanted_of(row_params, tl.load(indices + row), total)
    token = greedy
    left = ties
    for begin in range(0, vocab, PART):
        ids, values, keys = _chunk(row_logits, row_params, begin, vocab, shift)
        kept, equal = kept_weights(values, keys, low, left, best, scale, floor)
        mass = tl.sum(kept, axis=0)
        if (wanted >= 0) & (wanted < mass):
            token = first_beyond(kept, ids, wanted).to(tl.int64)
        wanted -= mass
        left = tl.maximum(left - equal, 0)
    tl.store(tokens + row, token)
