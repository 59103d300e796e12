"""Triton kernels that sample as :mod:`definition` says, token for token.

A row's logits are read once (:func:`summaries_kernel`): the largest of every group of 64 tokens, and the weights of
every part of 4,096. The 128 groups with the largest maxima hold every logit not below the least of those maxima, so
top-k of few tokens and top-p of a peaked distribution are found among them (:func:`choose_kernel`), in registers;
what is not, in passes over the row that part the remaining values into four (:func:`search_kernel`).
"""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from device_sampling.definition import EXP2, ROUNDER
from device_sampling.rows import BANNED, FIELDS, GOLDEN, HAS_TOP_P, IS_SAMPLED, MIX_1, MIX_2
from torch import Tensor

GROUP = 64  # tokens of one maximum
PART = 4096  # tokens of one sum of weights
MOST_GROUPS = 128  # that one program holds in registers
UNDECIDED = -2  # less a row's greedy token, in place of its token

_GROUP = tl.constexpr(GROUP)
_PART = tl.constexpr(PART)
_MOST_GROUPS = tl.constexpr(MOST_GROUPS)
_UNDECIDED = tl.constexpr(UNDECIDED)
_NO_TOKEN = tl.constexpr(-1)
_FIELDS = tl.constexpr(FIELDS)
_MODE, _SEED, _TOP_K, _TOP_P, _MIN_WEIGHT, _EDITS, _SCALE, _PRESENCE = (tl.constexpr(at) for at in range(FIELDS))
_IS_SAMPLED, _HAS_TOP_P, _BANNED = tl.constexpr(IS_SAMPLED), tl.constexpr(HAS_TOP_P), tl.constexpr(BANNED)
_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)
_E0, _E1, _E2, _E3, _E4, _E5 = (tl.constexpr(factor) for factor in EXP2)
_ROUNDER = tl.constexpr(ROUNDER)
_ROUNDER_BITS = tl.constexpr(0x4B400000)  # of ROUNDER as float32
_LARGEST = tl.constexpr(3.4028234663852886e38)
_LOWEST_KEY = tl.constexpr(-(2**31))


@triton.jit
def _bits_as_float(bits):
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _load_logits(logits, row_params, tokens, inside):
    """float32 logits, minus infinity outside of the vocabulary; edits as in ``definition.edit_logits``."""
    values = tl.load(logits + tokens, mask=inside, other=-float("inf")).to(tl.float32)
    address = tl.load(row_params + _EDITS)
    if address != 0:
        edits = tl.load(address.to(tl.pointer_type(tl.int32)) + tokens, mask=inside, other=0)
        repetition = _bits_as_float(tl.load(row_params + _SCALE) >> 32)
        presence = _bits_as_float(tl.load(row_params + _PRESENCE))
        frequency = _bits_as_float(tl.load(row_params + _PRESENCE) >> 32)
        kept = tl.where(values > 0, tl.div_rn(values, values * 0 + repetition), values * repetition)
        kept = tl.clamp(kept, -_LARGEST, _LARGEST)
        lost = tl.clamp(presence + frequency * edits.to(tl.float32), -_LARGEST, _LARGEST)
        changed = tl.clamp(kept - lost, -_LARGEST, _LARGEST)
        values = tl.where((edits > 0) & (values > -float("inf")), changed, values)
        values = tl.where(edits == _BANNED, -float("inf"), values)
    return values


@triton.jit
def _keys(values, shift):
    """int32 in the order of the floats. bfloat16 without edits have 16 bits of them: ``shift`` drops the others."""
    values = tl.where(values == 0.0, 0.0, values)  # one zero
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift


@triton.jit
def _value_of(key, shift):
    full = (key << shift) | tl.where(key < 0, (1 << shift) - 1, 0)
    return (full ^ ((full >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _shift(row_params, IS_BFLOAT16: tl.constexpr):
    return tl.where(IS_BFLOAT16 & (tl.load(row_params + _EDITS) == 0), 16, 0)


@triton.jit
def _weights(values, best, scale):
    """int64; see ``definition.weights``. Launched with ``enable_fp_fusion=False``: every rounding counts."""
    exponents = tl.maximum((values - best) * scale, -64.0)
    rounded = exponents + _ROUNDER
    rest = exponents - (rounded - _ROUNDER)
    power = rest * _E5 + _E4
    power = power * rest + _E3
    power = power * rest + _E2
    power = power * rest + _E1
    power = power * rest + _E0
    mantissa = (power * 16777216.0).to(tl.int32).to(tl.int64)
    down = tl.minimum(_ROUNDER_BITS - rounded.to(tl.int32, bitcast=True), 63)
    return (mantissa << 16) >> down.to(tl.int64)


@triton.jit
def _mixed(value):
    value = value + _GOLDEN
    value = (value ^ (value >> 30)) * _MIX_1
    value = (value ^ (value >> 27)) * _MIX_2
    return value ^ (value >> 31)


@triton.jit
def _wanted(row_params, index, total):
    """``total`` times the ``index``-th 64 random bits of the row's seed, over 2**64."""
    seed = tl.load(row_params + _SEED).to(tl.uint64, bitcast=True)
    bits = _mixed(seed + index.to(tl.uint64) * _GOLDEN)
    return tl.umulhi(total.to(tl.uint64), bits).to(tl.int64)


@triton.jit
def _top_p_limit(row_params, total):
    """``top_p * total`` rounded up, at least 1: before a token that top-p keeps there is less."""
    share = tl.load(row_params + _TOP_P).to(tl.uint64, bitcast=True)
    whole = total.to(tl.uint64)
    limit = tl.umulhi(whole, share) + tl.where(whole * share != 0, 1, 0).to(tl.uint64)
    return tl.maximum(limit.to(tl.int64), 1)


@triton.jit
def _edited_best(part_best, part_token, row, parts, PARTS: tl.constexpr):
    at = tl.arange(0, PARTS)
    values = tl.load(part_best + row * parts + at, mask=at < parts, other=-float("inf"))
    tokens = tl.load(part_token + row * parts + at, mask=at < parts, other=2147483647)
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, tokens, 2147483647), axis=0)


@triton.jit
def _row_best(logits, row_params, greedy, part_best, part_token, row, parts, PARTS: tl.constexpr):
    """The largest logit after edits; ``greedy`` tells where it is without them."""
    best = tl.load(logits + greedy).to(tl.float32)
    if tl.load(row_params + _EDITS) != 0:
        best, _ = _edited_best(part_best, part_token, row, parts, PARTS)
    return best


@triton.jit
def edited_best_kernel(logits, slots, rows, part_best, part_token, vocab, parts):
    """The largest logit after edits of each part of a row, and its token: of rows with edits alone."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    row_params = rows + tl.load(slots + row).to(tl.int64) * _FIELDS
    if tl.load(row_params + _EDITS) == 0:
        return
    ids = part * _PART + tl.arange(0, _PART)
    values = _load_logits(logits + row.to(tl.int64) * vocab, row_params, ids, ids < vocab)
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
    row_params = rows + tl.load(slots + row).to(tl.int64) * _FIELDS
    greedy = tl.load(tokens + row)
    mode = tl.load(row_params + _MODE)
    if ((mode & _IS_SAMPLED) == 0) | (greedy == _NO_TOKEN):
        return
    row_logits = logits + row.to(tl.int64) * vocab
    top_k = tl.load(row_params + _TOP_K)
    has_top_p = (mode & _HAS_TOP_P) != 0
    GROUPS: tl.constexpr = _PART // _GROUP
    group = part * GROUPS + tl.arange(0, GROUPS)
    ids = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    values = _load_logits(row_logits, row_params, ids, ids < vocab)
    if (top_k > 0) | has_top_p:
        keys = tl.max(_keys(values, _shift(row_params, IS_BFLOAT16)), axis=1)
        tl.store(group_keys + row * groups + group, keys, mask=group < groups)
    if top_k == 0:
        best = _row_best(row_logits, row_params, greedy, part_best, part_token, row, parts, PARTS)
        found = _weights(values, best, _bits_as_float(tl.load(row_params + _SCALE)))
        floor = tl.where(has_top_p, 0, tl.load(row_params + _MIN_WEIGHT))
        found = tl.where(found >= floor, found, 0)
        tl.store(part_weights + row * parts + part, tl.sum(tl.sum(found, axis=1), axis=0))


@triton.jit
def _kept_weights(values, keys, keys_at, ties, best, scale, floor):
    """The weights of what is kept of consecutive tokens: keys above ``keys_at``, the first ``ties`` equal to it, and
    of these those of at least ``floor``. Second: how many are equal to it."""
    is_tie = keys == keys_at
    rank = tl.cumsum(is_tie.to(tl.int32), axis=0)  # from 1
    found = _weights(values, best, scale)
    kept = ((keys > keys_at) | (is_tie & (rank <= ties))) & (found >= floor)
    return tl.where(kept, found, 0), tl.sum(is_tie.to(tl.int32), axis=0)


@triton.jit
def _first_beyond(kept, ids, wanted):
    """The first of consecutive tokens at which the sum of ``kept`` exceeds ``wanted``."""
    return tl.min(tl.where(tl.cumsum(kept, axis=0) > wanted, ids, 2147483647), axis=0)


@triton.jit
def _choose_unrestricted(row_logits, row_params, index, best, sums, vocab, PARTS: tl.constexpr):
    """By the sums of the parts' weights, then within one part."""
    at_part = tl.arange(0, PARTS)
    wanted = _wanted(row_params, index, tl.sum(sums, axis=0))
    part = tl.min(tl.where(tl.cumsum(sums, axis=0) > wanted, at_part, PARTS), axis=0)
    wanted -= tl.sum(tl.where(at_part < part, sums, 0), axis=0)
    ids = part * _PART + tl.arange(0, _PART)
    values = _load_logits(row_logits, row_params, ids, ids < vocab)
    found = _weights(values, best, _bits_as_float(tl.load(row_params + _SCALE)))
    found = tl.where((found >= tl.load(row_params + _MIN_WEIGHT)) & (ids < vocab), found, 0)
    return _first_beyond(found, ids, wanted)


@triton.jit
def _choose_restricted(
    row_logits, row_params, index, best, sums, maxima, chosen_groups, vocab, groups,
    GROUPS: tl.constexpr, IS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """(token, whether it is one): among the groups with the largest maxima."""
    scale = _bits_as_float(tl.load(row_params + _SCALE))
    top_k = tl.load(row_params + _TOP_K).to(tl.int32)
    has_top_p = (tl.load(row_params + _MODE) & _HAS_TOP_P) != 0
    shift = _shift(row_params, IS_BFLOAT16)
    top = _keys(best, shift)
    # All groups whose maximum reaches `least`, which is as low as MOST_GROUPS allow.
    at_group = tl.arange(0, GROUPS)
    is_group = at_group < groups
    least = top + 1
    below = tl.min(tl.where(is_group, maxima, top), axis=0) - 1
    if groups <= _MOST_GROUPS:
        least = below + 1
    while below + 1 < least:
        middle = (least & below) + ((least ^ below) >> 1)
        fits = tl.sum((is_group & (maxima >= middle)).to(tl.int32), axis=0) <= _MOST_GROUPS
        least = tl.where(fits, middle, least)
        below = tl.where(fits, below, middle)
    is_chosen = is_group & (maxima >= least)
    place = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    chosen = tl.sum(is_chosen.to(tl.int32), axis=0)
    tl.store(chosen_groups + place, at_group, mask=is_chosen)
    tl.debug_barrier()  # other threads of this program read them

    at = tl.arange(0, _MOST_GROUPS * _GROUP)
    group = tl.load(chosen_groups + at // _GROUP, mask=at // _GROUP < chosen, other=groups)
    ids = group * _GROUP + at % _GROUP
    inside = ids < vocab
    values = _load_logits(row_logits, row_params, ids, inside)
    keys = _keys(values, shift)
    keys = tl.where(inside & (keys >= least), keys, _LOWEST_KEY)
    found = tl.where(keys > _LOWEST_KEY, _weights(values, best, scale), 0)

    low = least
    ties = top_k * 0 + 2147483647
    high = top + 1
    above = tl.sum(found, axis=0) * 0
    is_decided = top_k >= 0
    if top_k > 0:
        is_decided = tl.sum((keys > _LOWEST_KEY).to(tl.int32), axis=0) >= top_k
        while low + 1 < high:
            middle = (low & high) + ((low ^ high) >> 1)
            enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        ties = top_k - tl.sum((keys > low).to(tl.int32), axis=0)
    if has_top_p:
        above = tl.sum(tl.where(keys > low, found, 0), axis=0)
        total = above + ties * _weights(_value_of(low, shift), best, scale)
        if top_k == 0:
            total = tl.sum(sums, axis=0)
        limit = _top_p_limit(row_params, total)
        is_decided = is_decided & ((top_k > 0) | (tl.sum(found, axis=0) >= limit))
        if (top_k == 0) | (above >= limit):
            low, above = _least_key_of_top_p(keys, found, low, top + 1, limit)
            ties = top_k * 0 + 2147483647
        ties = _ties_of_top_p(limit, above, low, shift, best, scale, ties)
    kept, _ = _kept_weights(values, keys, low, ties, best, scale, tl.load(row_params + _MIN_WEIGHT))
    wanted = _wanted(row_params, index, tl.sum(kept, axis=0))
    return _first_beyond(kept, ids, wanted), is_decided


@triton.jit
def _least_key_of_top_p(keys, found, low, high, limit):
    """The largest key such that keys not below it weigh ``limit``, as those not below ``low`` do; what larger weigh."""
    above = tl.sum(found, axis=0) * 0
    while low + 1 < high:
        middle = (low & high) + ((low ^ high) >> 1)
        mass = tl.sum(tl.where(keys >= middle, found, 0), axis=0)
        low = tl.where(mass >= limit, middle, low)
        high = tl.where(mass >= limit, high, middle)
        above = tl.where(mass >= limit, above, mass)
    return low, above


@triton.jit
def _ties_of_top_p(limit, above, low, shift, best, scale, most):
    """How many tokens of the key ``low`` it takes from ``above`` to ``limit``."""
    each = tl.maximum(_weights(_value_of(low, shift), best, scale), 1)
    return tl.minimum((limit - above + each - 1) // each, most).to(tl.int32)


@triton.jit
def choose_kernel(
    logits, tokens, slots, indices, rows, part_best, part_token, group_keys, part_weights, chosen_groups,
    vocab, groups, parts, PARTS: tl.constexpr, GROUPS: tl.constexpr, IS_BFLOAT16: tl.constexpr,
):  # fmt: skip
    """A row's token in place of the greedy one; ``UNDECIDED`` less that if the largest groups do not tell."""
    row = tl.program_id(0)
    row_params = rows + tl.load(slots + row).to(tl.int64) * _FIELDS
    greedy = tl.load(tokens + row)
    mode = tl.load(row_params + _MODE)
    is_sampled = (mode & _IS_SAMPLED) != 0
    has_edits = tl.load(row_params + _EDITS) != 0
    if (greedy == _NO_TOKEN) | ((is_sampled | has_edits) == 0):
        return
    row_logits = logits + row.to(tl.int64) * vocab
    best = tl.load(row_logits + greedy).to(tl.float32)
    if has_edits:
        best, token = _edited_best(part_best, part_token, row, parts, PARTS)
        excludes_all = best == -float("inf")
        is_sampled = is_sampled & (excludes_all == 0)
        tl.store(tokens + row, tl.where(excludes_all, _NO_TOKEN, token).to(tl.int64))
    if is_sampled:
        index = tl.load(indices + row)
        at_part = tl.arange(0, PARTS)
        sums = tl.load(part_weights + row * parts + at_part, mask=at_part < parts, other=0)
        if (tl.load(row_params + _TOP_K) == 0) & ((mode & _HAS_TOP_P) == 0):
            token = _choose_unrestricted(row_logits, row_params, index, best, sums, vocab, PARTS)
            tl.store(tokens + row, token.to(tl.int64))
        else:
            at_group = tl.arange(0, GROUPS)
            maxima = tl.load(group_keys + row * groups + at_group, mask=at_group < groups, other=_LOWEST_KEY)
            token, is_decided = _choose_restricted(
                row_logits, row_params, index, best, sums, maxima, chosen_groups + row * _MOST_GROUPS, vocab,
                groups, GROUPS, IS_BFLOAT16,
            )  # fmt: skip
            tl.store(tokens + row, tl.where(is_decided, token.to(tl.int64), _UNDECIDED - greedy))


@triton.jit
def _chunk(row_logits, row_params, begin, vocab, shift):
    ids = begin + tl.arange(0, _PART)
    values = _load_logits(row_logits, row_params, ids, ids < vocab)
    return ids, values, tl.where(ids < vocab, _keys(values, shift), _LOWEST_KEY)


@triton.jit
def _pass_of_counts(row_logits, row_params, first, second, third, vocab, shift):
    """How many tokens are not below each of three keys."""
    at_first = tl.zeros((), tl.int64)
    at_second = tl.zeros((), tl.int64)
    at_third = tl.zeros((), tl.int64)
    for begin in range(0, vocab, _PART):
        _, _, keys = _chunk(row_logits, row_params, begin, vocab, shift)
        at_first += tl.sum((keys >= first).to(tl.int32), axis=0)
        at_second += tl.sum((keys >= second).to(tl.int32), axis=0)
        at_third += tl.sum((keys >= third).to(tl.int32), axis=0)
    return at_first, at_second, at_third


@triton.jit
def _pass_of_weights(row_logits, row_params, best, first, second, third, vocab, shift):
    """What the tokens weigh that are not below each of three keys."""
    scale = _bits_as_float(tl.load(row_params + _SCALE))
    at_first = tl.zeros((), tl.int64)
    at_second = tl.zeros((), tl.int64)
    at_third = tl.zeros((), tl.int64)
    for begin in range(0, vocab, _PART):
        _, values, keys = _chunk(row_logits, row_params, begin, vocab, shift)
        found = _weights(values, best, scale)
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
    scale = _bits_as_float(tl.load(row_params + _SCALE))
    ids = tl.arange(0, _PART) * tl.cdiv(vocab, _PART)
    values = _load_logits(row_logits, row_params, ids, ids < vocab)
    keys = tl.where(ids < vocab, _keys(values, shift), _LOWEST_KEY)
    found = tl.where(ids < vocab, _weights(values, best, scale), 0)
    share = tl.sum(found, axis=0).to(tl.float32) / total.to(tl.float32)
    wanted = limit.to(tl.float32) * share
    margin = total.to(tl.float32) * share * 0.012
    first, _ = _least_key_of_top_p(keys, found, low, high, (wanted + margin).to(tl.int64))
    third, _ = _least_key_of_top_p(keys, found, low, high, tl.maximum(wanted - margin, 1.0).to(tl.int64))
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
                bottom = _value_of(low, shift)
                width = _value_of(high, shift) - bottom
                part = (at_low - limit).to(tl.float32) / tl.maximum((at_low - above).to(tl.float32), 1.0)
                if (width < float("inf")) & (bottom > -float("inf")):
                    second = _keys(bottom + width * part, shift)
                    first = _keys(bottom + width * (part - 0.125), shift)
                    third = _keys(bottom + width * (part + 0.125), shift)
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
    greedy = _UNDECIDED - tl.load(tokens + row)
    if greedy < 0:
        return
    row_params = rows + tl.load(slots + row).to(tl.int64) * _FIELDS
    row_logits = logits + row.to(tl.int64) * vocab
    best = _row_best(row_logits, row_params, greedy, part_best, part_token, row, parts, PARTS)
    scale = _bits_as_float(tl.load(row_params + _SCALE))
    top_k = tl.load(row_params + _TOP_K)
    floor = tl.load(row_params + _MIN_WEIGHT)
    shift = _shift(row_params, IS_BFLOAT16)
    top = _keys(best, shift)
    low = _keys(best * 0 - float("inf"), shift)
    ties = top_k * 0 + 2147483647
    above = top_k * 0
    if top_k > 0:
        low, above = _search_top_k(row_logits, row_params, low, top + 1, top_k, vocab, shift)
        ties = top_k - above
    has_top_p = (tl.load(row_params + _MODE) & _HAS_TOP_P) != 0
    total = top_k * 0
    if has_top_p:
        above = top_k * 0
        if top_k > 0:
            for begin in range(0, vocab, _PART):
                _, values, keys = _chunk(row_logits, row_params, begin, vocab, shift)
                above += tl.sum(tl.where(keys > low, _weights(values, best, scale), 0), axis=0)
            total = above + ties * _weights(_value_of(low, shift), best, scale)
        else:
            at_part = tl.arange(0, PARTS)
            total = tl.sum(tl.load(part_weights + row * parts + at_part, mask=at_part < parts, other=0), axis=0)
        limit = _top_p_limit(row_params, total)
        if (top_k == 0) | (above >= limit):
            low, above = _search_top_p(row_logits, row_params, best, low, top + 1, total, limit, vocab, shift)
            ties = top_k * 0 + 2147483647
        ties = _ties_of_top_p(limit, above, low, shift, best, scale, ties).to(tl.int64)
    if has_top_p & (floor == 0):
        total = above + ties * _weights(_value_of(low, shift), best, scale)
    else:
        total = top_k * 0
        left = ties
        for begin in range(0, vocab, _PART):
            _, values, keys = _chunk(row_logits, row_params, begin, vocab, shift)
            kept, equal = _kept_weights(values, keys, low, left, best, scale, floor)
            total += tl.sum(kept, axis=0)
            left = tl.maximum(left - equal, 0)
    wanted = _wanted(row_params, tl.load(indices + row), total)
    token = greedy
    left = ties
    for begin in range(0, vocab, _PART):
        ids, values, keys = _chunk(row_logits, row_params, begin, vocab, shift)
        kept, equal = _kept_weights(values, keys, low, left, best, scale, floor)
        mass = tl.sum(kept, axis=0)
        if (wanted >= 0) & (wanted < mass):
            token = _first_beyond(kept, ids, wanted).to(tl.int64)
        wanted -= mass
        left = tl.maximum(left - equal, 0)
    tl.store(tokens + row, token)


@triton.jit
def count_kernel(tokens, slots, rows):
    """One more of its token in each row's edits."""
    row = tl.program_id(0)
    address = tl.load(rows + tl.load(slots + row).to(tl.int64) * _FIELDS + _EDITS)
    token = tl.load(tokens + row)
    if (address != 0) & (token >= 0):
        count = address.to(tl.pointer_type(tl.int32)) + token
        tl.store(count, tl.load(count) + 1)


class TritonSampling:
    """Launches of the kernels, behind a graph or not: nothing is waited for, and what a batch does not need is not
    launched."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._groups = triton.cdiv(vocab_size, GROUP)
        self._parts = triton.cdiv(vocab_size, PART)
        self._part_best = torch.empty(max_rows, self._parts, dtype=torch.float32, device=device)
        self._part_token = torch.empty(max_rows, self._parts, dtype=torch.int32, device=device)
        self._part_weights = torch.empty(max_rows, self._parts, dtype=torch.int64, device=device)
        self._group_keys = torch.empty(max_rows, self._groups, dtype=torch.int32, device=device)
        self._chosen_groups = torch.empty(max_rows, MOST_GROUPS, dtype=torch.int32, device=device)

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
