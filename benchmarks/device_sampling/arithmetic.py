"""What the sampling kernels share: a row's parameters, its logits with edits, their weights and their order."""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from device_sampling import definition, rows

GROUP = tl.constexpr(64)  # tokens of one maximum
PART = tl.constexpr(4096)  # tokens of one sum of weights
MOST_GROUPS = tl.constexpr(128)  # that one program holds in registers
UNDECIDED = tl.constexpr(-2)  # less a row's greedy token, in place of its token
NO_TOKEN = tl.constexpr(definition.NO_TOKEN)
FIELDS = tl.constexpr(rows.FIELDS)
MODE, SEED, TOP_K, TOP_P, MIN_WEIGHT, EDITS, SCALE, PRESENCE = (tl.constexpr(at) for at in range(rows.FIELDS))
IS_SAMPLED, HAS_TOP_P, BANNED = tl.constexpr(rows.IS_SAMPLED), tl.constexpr(rows.HAS_TOP_P), tl.constexpr(rows.BANNED)
GOLDEN, MIX_1, MIX_2 = tl.constexpr(rows.GOLDEN), tl.constexpr(rows.MIX_1), tl.constexpr(rows.MIX_2)
E0, E1, E2, E3, E4, E5 = (tl.constexpr(factor) for factor in definition.EXP2)
ROUNDER = tl.constexpr(definition.ROUNDER)
ROUNDER_BITS = tl.constexpr(0x4B400000)  # of ROUNDER as float32
LARGEST = tl.constexpr(3.4028234663852886e38)
LOWEST_KEY = tl.constexpr(-(2**31))


@triton.jit
def bits_as_float(bits):
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(logits, row_params, tokens, inside):
    """float32 logits, minus infinity outside of the vocabulary; edits as in ``definition.edit_logits``."""
    values = tl.load(logits + tokens, mask=inside, other=-float("inf")).to(tl.float32)
    address = tl.load(row_params + EDITS)
    if address != 0:
        edits = tl.load(address.to(tl.pointer_type(tl.int32)) + tokens, mask=inside, other=0)
        repetition = bits_as_float(tl.load(row_params + SCALE) >> 32)
        presence = bits_as_float(tl.load(row_params + PRESENCE))
        frequency = bits_as_float(tl.load(row_params + PRESENCE) >> 32)
        kept = tl.where(values > 0, tl.div_rn(values, values * 0 + repetition), values * repetition)
        kept = tl.clamp(kept, -LARGEST, LARGEST)
        lost = tl.clamp(presence + frequency * edits.to(tl.float32), -LARGEST, LARGEST)
        changed = tl.clamp(kept - lost, -LARGEST, LARGEST)
        values = tl.where((edits > 0) & (values > -float("inf")), changed, values)
        values = tl.where(edits == BANNED, -float("inf"), values)
    return values


@triton.jit
def keys_of(values, shift):
    """int32 in the order of the floats. bfloat16 without edits have 16 bits of them: ``shift`` drops the others."""
    values = tl.where(values == 0.0, 0.0, values)  # one zero
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift


@triton.jit
def value_of(key, shift):
    full = (key << shift) | tl.where(key < 0, (1 << shift) - 1, 0)
    return (full ^ ((full >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def shift_of(row_params, IS_BFLOAT16: tl.constexpr):
    return tl.where(IS_BFLOAT16 & (tl.load(row_params + EDITS) == 0), 16, 0)


@triton.jit
def weights_of(values, best, scale):
    """int64; see ``definition.weights``. Launched with ``enable_fp_fusion=False``: every rounding counts."""
    exponents = tl.maximum((values - best) * scale, -64.0)
    rounded = exponents + ROUNDER
    rest = exponents - (rounded - ROUNDER)
    power = rest * E5 + E4
    power = power * rest + E3
    power = power * rest + E2
    power = power * rest + E1
    power = power * rest + E0
    mantissa = (power * 16777216.0).to(tl.int32).to(tl.int64)
    down = tl.minimum(ROUNDER_BITS - rounded.to(tl.int32, bitcast=True), 63)
    return (mantissa << 16) >> down.to(tl.int64)


@triton.jit
def mixed(value):
    value = value + GOLDEN
    value = (value ^ (value >> 30)) * MIX_1
    value = (value ^ (value >> 27)) * MIX_2
    return value ^ (value >> 31)


@triton.jit
def wanted_of(row_params, index, total):
    """``total`` times the ``index``-th 64 random bits of the row's seed, over 2**64."""
    seed = tl.load(row_params + SEED).to(tl.uint64, bitcast=True)
    bits = mixed(seed + index.to(tl.uint64) * GOLDEN)
    return tl.umulhi(total.to(tl.uint64), bits).to(tl.int64)


@triton.jit
def top_p_limit(row_params, total):
    """``top_p * total`` rounded up, at least 1: before a token that top-p keeps there is less."""
    share = tl.load(row_params + TOP_P).to(tl.uint64, bitcast=True)
    whole = total.to(tl.uint64)
    limit = tl.umulhi(whole, share) + tl.where(whole * share != 0, 1, 0).to(tl.uint64)
    return tl.maximum(limit.to(tl.int64), 1)


@triton.jit
def edited_best(part_best, part_token, row, parts, PARTS: tl.constexpr):
    at = tl.arange(0, PARTS)
    values = tl.load(part_best + row * parts + at, mask=at < parts, other=-float("inf"))
    tokens = tl.load(part_token + row * parts + at, mask=at < parts, other=2147483647)
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, tokens, 2147483647), axis=0)


@triton.jit
def row_best(logits, row_params, greedy, part_best, part_token, row, parts, PARTS: tl.constexpr):
    """The largest logit after edits; ``greedy`` tells where it is without them."""
    best = tl.load(logits + greedy).to(tl.float32)
    if tl.load(row_params + EDITS) != 0:
        best, _ = edited_best(part_best, part_token, row, parts, PARTS)
    return best


@triton.jit
def kept_weights(values, keys, keys_at, ties, best, scale, floor):
    """The weights of what is kept of consecutive tokens: keys above ``keys_at``, the first ``ties`` equal to it, and
    of these those of at least ``floor``. Second: how many are equal to it."""
    is_tie = keys == keys_at
    rank = tl.cumsum(is_tie.to(tl.int32), axis=0)  # from 1
    found = weights_of(values, best, scale)
    kept = ((keys > keys_at) | (is_tie & (rank <= ties))) & (found >= floor)
    return tl.where(kept, found, 0), tl.sum(is_tie.to(tl.int32), axis=0)


@triton.jit
def first_beyond(kept, ids, wanted):
    """The first of consecutive tokens at which the sum of ``kept`` exceeds ``wanted``."""
    return tl.min(tl.where(tl.cumsum(kept, axis=0) > wanted, ids, 2147483647), axis=0)


@triton.jit
def least_key_of_top_p(keys, found, low, high, limit):
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
def ties_of_top_p(limit, above, low, shift, best, scale, most):
    """How many tokens of the key ``low`` it takes from ``above`` to ``limit``."""
    each = tl.maximum(weights_of(value_of(low, shift), best, scale), 1)
    return tl.minimum((limit - above + each - 1) // each, most).to(tl.int32)
