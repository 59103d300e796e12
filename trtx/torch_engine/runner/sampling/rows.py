"""A sequence's sampling parameters in the numeric form that the sampling kernels use."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from trtx.torch_engine.sampling_plan import LARGEST_FLOAT, SMALLEST_FLOAT, SamplingPlan

WEIGHT_BITS = 40
"""The likeliest token has the integer weight 2**40; other tokens' weights are relative to it.

The weights of 2**22 tokens then add up to less than 2**63, so an int64 can hold the sum. A token that is less than
1e-12 times as likely as the likeliest token gets weight 0.
"""
GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 0xFFFFFFFFFFFFFFFF

FIELDS = 9
"""Number of int64 values of a row on the device."""
MODE, SEED, TOP_K, TOP_P, MIN_WEIGHT, EDITS, SCALE, PRESENCE, PROMPT_TOKENS = range(FIELDS)  # in this order
IS_SAMPLED, HAS_TOP_P = 1, 2  # bits of MODE
PLAIN_FIELDS = (0,) * FIELDS
"""Fields of a greedy row without penalties or banned ids."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row's sampling parameters. A greedy row omits top-k, top-p and min-p, which would change nothing."""

    is_sampled: bool
    seed: int  # the request's seed after one mix(); each random number takes one more mix()
    scale: float  # log2(e) / temperature
    top_k: int  # 0: all
    top_p: int  # in units of 2**-64
    has_top_p: bool
    min_weight: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    prompt_tokens: int

    @classmethod
    def of(cls, plan: SamplingPlan, seed: int, prompt_tokens: int, vocab_size: int) -> SamplingRow:
        """``prompt_tokens``: number of leading tokens that do not count in the index into ``seed``'s stream."""
        is_sampled = not plan.is_greedy
        return cls(
            is_sampled=is_sampled,
            seed=mix(seed),
            scale=min(max(math.log2(math.e) / max(plan.temperature, 1e-300), SMALLEST_FLOAT), LARGEST_FLOAT),
            top_k=plan.top_k if is_sampled and plan.top_k < vocab_size else 0,
            top_p=min(int(math.ldexp(plan.top_p, 64)), _MASK),
            has_top_p=is_sampled and plan.top_p < 1.0,
            min_weight=math.ceil(math.ldexp(plan.min_p, WEIGHT_BITS)),
            repetition_penalty=plan.repetition_penalty,
            presence_penalty=plan.presence_penalty,
            frequency_penalty=plan.frequency_penalty,
            prompt_tokens=prompt_tokens,
        )

    def index(self, position: int) -> int:
        """Index of the random number for the token after ``position``: the number of counted tokens before it."""
        return position + 1 - self.prompt_tokens

    def fields(self, edits_address: int) -> tuple[int, ...]:
        """Device fields of the row. ``edits_address``: address of its penalties on the device; 0 if it has none."""
        if not self.is_sampled and not edits_address:
            return PLAIN_FIELDS
        numbers = struct.pack(
            "<4f", self.scale, self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        )  # fmt: skip
        return (
            IS_SAMPLED * self.is_sampled + HAS_TOP_P * self.has_top_p, _signed(self.seed), self.top_k,
            _signed(self.top_p), self.min_weight, edits_address, *struct.unpack("<2q", numbers), self.prompt_tokens,
        )  # fmt: skip


def mix(value: int) -> int:
    """The number that splitmix64 returns for a state.

    See Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    value = (value + GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK
    return value ^ (value >> 31)


def random_bits(mixed_seed: int, index: int, attempt: int = 0) -> int:
    """64 bits of a seed's stream for one attempt at the ``index``-th token; ``index`` is below 2**32."""
    return mix((mixed_seed + (index + (attempt << 32)) * GOLDEN) & _MASK)


def _signed(value: int) -> int:
    """Reinterprets 64 unsigned bits as torch's int64."""
    return value - 2**64 if value >= 2**63 else value
