"""Shared functions of the sampling kernels: a row's parameters, edited logits, weights and token order."""

# Triton has no type stubs, and its decorator hides the signature.
# mypy: disable-error-code="misc, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from trtx.torch_engine.runner.sampling import definition, rows

PART = tl.constexpr(4096)  # tokens in one partial sum of weights
NO_TOKEN = tl.constexpr(definition.NO_TOKEN)
BEYOND = tl.constexpr(2**31 - 1)  # larger than any token id
FIELDS = tl.constexpr(rows.FIELDS)
MODE, SEED, TOP_K, TOP_P, MIN_WEIGHT, EDITS, SCALE, PRESENCE, PROMPT_TOKENS = (
    tl.constexpr(at) for at in range(rows.FIELDS)
)
IS_SAMPLED, HAS_TOP_P = tl.constexpr(rows.IS_SAMPLED), tl.constexpr(rows.HAS_TOP_P)
GOLDEN, MIX_1, MIX_2 = tl.constexpr(rows.GOLDEN), tl.constexpr(rows.MIX_1), tl.constexpr(rows.MIX_2)
E0, E1, E2, E3, E4, E5 = (tl.constexpr(factor) for factor in definition.EXP2)
ROUNDER = tl.constexpr(definition.ROUNDER)
LOWEST_EXPONENT = tl.constexpr(definition.LOWEST_EXPONENT)
ROUNDER_BITS = tl.constexpr(0x4B400000)  # ROUNDER's float32 bits


@triton.jit
def bits_as_float(bits):
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def edits_at(row_params):
    """Address of a row's edits; 0 if it has none."""
    return tl.load(row_params + EDITS)


@triton.jit
def edited_logits(address, vocab):
    """Pointer to a row's edited logits, which follow its edits: see ``SamplingSlots``."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16) + (vocab + 3) // 4 * 4


@triton.jit
def load_logits(row_logits, row_params, tokens, vocab):
    """Loads float32 logits of a row, the edited ones if it has edits; minus infinity outside the vocabulary."""
    inside = tokens < vocab
    address = edits_at(row_params)
    if address != 0:
        values = tl.load(edited_logits(address, vocab) + tokens, mask=inside, other=-float("inf"))
    else:
        values = tl.load(row_logits + tokens, mask=inside, other=-float("inf")).to(tl.float32)
    return values


@triton.jit
def load_part(row_logits, row_params, part, vocab):
    """Returns (ids, logits) of one part."""
    ids = part * PART + tl.arange(0, PART)
    return ids, load_logits(row_logits, row_params, ids, vocab)


@triton.jit
def load_best(part_best, row, parts, PARTS: tl.constexpr):
    """Largest logit of each part; minus infinity beyond the last part."""
    at = tl.arange(0, PARTS)
    return tl.load(part_best + row * parts + at, mask=at < parts, other=-float("inf"))


@triton.jit
def has_token(best):
    return (best > -float("inf")) & (best < float("inf"))


@triton.jit
def weights_of(values, best, scale):
    """int64 weights; see ``definition.weights``. Launch with ``enable_fp_fusion=False``: every rounding counts."""
    exponents = tl.maximum((values - best) * scale, LOWEST_EXPONENT)
    rounded = exponents + ROUNDER
    rest = exponents - (rounded - ROUNDER)
    power = rest * E5 + E4
    power = power * rest + E3
    power = power * rest + E2
    power = power * rest + E1
    power = power * rest + E0
    mantissa = (power * 16777216.0).to(tl.int32).to(tl.int64)
    down = ROUNDER_BITS - rounded.to(tl.int32, bitcast=True)
    return (mantissa << 16) >> down.to(tl.int64)


@triton.jit
def is_before(values, ids, value, token):
    """Whether tokens come before ``token``, with logit ``value``, in the order by logit."""
    return (values > value) | ((values == value) & (ids < token))


@triton.jit
def mixed(value):
    value = value + GOLDEN
    value = (value ^ (value >> 30)) * MIX_1
    value = (value ^ (value >> 27)) * MIX_2
    return value ^ (value >> 31)


@triton.jit
def wanted_of(row_params, position, attempt, total):
    """``total`` times the random bits of an attempt at the token after ``position``, over 2**64."""
    seed = tl.load(row_params + SEED).to(tl.uint64, bitcast=True)
    index = position.to(tl.int64) + 1 - tl.load(row_params + PROMPT_TOKENS)
    bits = mixed(seed + (index + (attempt << 32)).to(tl.uint64) * GOLDEN)
    return tl.umulhi(total.to(tl.uint64), bits).to(tl.int64)


@triton.jit
def top_p_limit(row_params, total):
    """``top_p * total`` rounded up, at least 1. Top-p keeps a token if the weight before it is below this."""
    share = tl.load(row_params + TOP_P).to(tl.uint64, bitcast=True)
    whole = total.to(tl.uint64)
    limit = tl.umulhi(whole, share) + tl.where(whole * share != 0, 1, 0).to(tl.uint64)
    return tl.maximum(limit.to(tl.int64), 1)


@triton.jit
def first_beyond(weights, ids, wanted):
    """The first of consecutive tokens at which the cumulative sum of ``weights`` exceeds ``wanted``."""
    return tl.min(tl.where(tl.cumsum(weights, axis=0) > wanted, ids, BEYOND), axis=0)


@triton.jit
def part_beyond(sums, wanted, PARTS: tl.constexpr):
    """Returns (part in which the cumulative sum of ``sums`` first exceeds ``wanted``, rest of ``wanted`` in it)."""
    at = tl.arange(0, PARTS)
    part = tl.min(tl.where(tl.cumsum(sums, axis=0) > wanted, at, PARTS - 1), axis=0)
    return part, wanted - tl.sum(tl.where(at < part, sums, 0), axis=0)


@triton.jit
def keys_of(values, shift):
    """Returns int32 keys that sort as the float32 ``values`` do. ``shift``: the number of low bits to drop.

    bfloat16 logits without penalties and banned tokens need only the upper 16 bits.
    """
    values = tl.where(values == 0.0, 0.0, values)  # maps -0.0 to 0.0
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift


@triton.jit
def value_of(key, shift):
    full = (key << shift) | tl.where(key < 0, (1 << shift) - 1, 0)
    return (full ^ ((full >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def shift_of(row_params, IS_BFLOAT16: tl.constexpr):
    return tl.where(IS_BFLOAT16 & (edits_at(row_params) == 0), 16, 0)
