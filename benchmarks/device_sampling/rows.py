"""What the sampler knows of each slot: a sequence's parameters as numbers, and its edits of the logits."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from trtx.torch_engine.batch import ScheduledSequence
from trtx.torch_engine.runner.kernels import int32
from trtx.torch_engine.sampling_plan import SamplingPlan

WEIGHT_BITS = 40
"""The likeliest token's weight is 2**40. A vocabulary of 2**22 tokens then adds up to less than 2**63, and one less
than 1e-12 times as likely as the best has no weight."""
GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BANNED = -(2**31)  # in place of a count
_MASK = 0xFFFFFFFFFFFFFFFF
_FLOATS = (1.1754943508222875e-38, 3.4028234663852886e38)  # the smallest normal float32, the largest

FIELDS = 8
"""int64 values of a row on the device, in the order of :meth:`SamplingRow.fields`."""
IS_SAMPLED, HAS_TOP_P = 1, 2  # bits of the first of them


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """A plan as the integers and float32 numbers that a device compares and multiplies with."""

    is_sampled: bool
    seed: int  # mixed once: a number of its stream takes one mixing more
    scale: float  # log2(e) / temperature
    top_k: int  # 0: all
    top_p: int  # of 2**64
    has_top_p: bool
    min_weight: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float

    @classmethod
    def of(cls, plan: SamplingPlan, seed: int, vocab_size: int) -> SamplingRow:
        low, high = _FLOATS
        return cls(
            is_sampled=not plan.is_greedy,
            seed=mix(seed),
            scale=min(max(math.log2(math.e) / max(plan.temperature, 1e-300), low), high),
            top_k=plan.top_k if plan.top_k < vocab_size else 0,
            top_p=min(int(math.ldexp(plan.top_p, 64)), _MASK),
            has_top_p=plan.top_p < 1.0,
            min_weight=math.ceil(math.ldexp(plan.min_p, WEIGHT_BITS)),
            repetition_penalty=plan.repetition_penalty,
            presence_penalty=plan.presence_penalty,
            frequency_penalty=plan.frequency_penalty,
        )

    @property
    def is_restricted(self) -> bool:
        return self.is_sampled and (self.top_k > 0 or self.has_top_p)

    def fields(self, edits: Tensor | None) -> list[int]:
        mode = IS_SAMPLED * self.is_sampled + HAS_TOP_P * self.has_top_p
        numbers = struct.pack(
            "<4f", self.scale, self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        )  # fmt: skip
        return [
            mode, signed(self.seed), self.top_k, signed(self.top_p), self.min_weight,
            0 if edits is None else edits.data_ptr(), *struct.unpack("<2q", numbers),
        ]  # fmt: skip


@dataclass(slots=True)
class _Held:
    """A slot's last sequence, by what tells whether its row is still right."""

    sampling: SamplingPlan
    seed: int
    row: SamplingRow
    edits: Tensor | None = None
    banned_ids: tuple[int, ...] = ()
    output_token_ids: list[int] | None = None
    counted: int = 0  # tokens in the edits' counts


class SamplingRows:
    """Rows by slot, uploaded when a slot's sequence or its banned ids change: nothing of them travels at every step.

    Edits are one int32 a token of the vocabulary, for sequences with penalties or banned ids alone: how often it was
    seen in prompt and output, ``BANNED`` if it must not be sampled. What a step samples the device counts itself.
    """

    def __init__(self, max_batch_size: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._held: list[_Held | None] = [None] * max_batch_size
        self._changed: dict[int, list[int]] = {}
        self.on_device = torch.zeros(max_batch_size, FIELDS, dtype=torch.int64, device=device)

    def update(self, sequence: ScheduledSequence) -> tuple[SamplingRow, Tensor | None]:
        """The row of ``sequence``, which samples in this step, and its edits; :meth:`upload` must follow."""
        held = self._held[sequence.slot]
        plan = sequence.sampling
        if held is None or held.seed != sequence.seed or (held.sampling is not plan and held.sampling != plan):
            row = SamplingRow.of(plan, sequence.seed, self._vocab_size)
            held = self._held[sequence.slot] = _Held(plan, sequence.seed, row)
            self._changed[sequence.slot] = row.fields(None)
        if sequence.banned_ids or plan.has_penalties:
            self._update_edits(held, sequence)
        elif held.edits is not None:
            held.edits = None
            self._changed[sequence.slot] = held.row.fields(None)
        return held.row, held.edits

    def _update_edits(self, held: _Held, sequence: ScheduledSequence) -> None:
        known = len(sequence.prompt_token_ids) + len(sequence.output_token_ids)
        if (
            held.edits is None
            or sequence.is_first
            or held.counted != known
            or held.banned_ids is not sequence.banned_ids
            or held.output_token_ids is not sequence.output_token_ids
        ):
            held.edits = self._new_edits(sequence)
            held.banned_ids, held.output_token_ids = sequence.banned_ids, sequence.output_token_ids
            self._changed[sequence.slot] = held.row.fields(held.edits)
        held.counted = known + 1  # with this step's

    def forget(self, slot: int) -> None:
        """Whatever the slot held is not used again: a plain sequence has it."""
        if self._held[slot] is not None:
            self._held[slot] = None
            self._changed[slot] = [0] * FIELDS

    def upload(self) -> None:
        """Enqueues one small copy for all rows that changed."""
        if self._changed and self._device.type == "cuda":
            values = [value for fields in self._changed.values() for value in fields]
            slots = int32(list(self._changed), self._device).long()
            rows = torch.tensor(values, dtype=torch.int64, pin_memory=True).to(self._device, non_blocking=True)
            self.on_device[slots] = rows.view(-1, FIELDS)
        self._changed.clear()

    def _new_edits(self, sequence: ScheduledSequence) -> Tensor:
        edits = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
        if sequence.sampling.has_penalties:
            seen = int32(sequence.prompt_token_ids + sequence.output_token_ids, self._device)
            edits.index_add_(0, seen, torch.ones_like(seen))
        if sequence.banned_ids:
            edits.index_fill_(0, int32(list(sequence.banned_ids), self._device).long(), BANNED)
        return edits


def mix(value: int) -> int:
    """splitmix64's next number from a state: Steele, Lea and Flood, "Fast splittable pseudorandom number generators"
    (2014)."""
    value = (value + GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK
    return value ^ (value >> 31)


def random_bits(mixed_seed: int, index: int) -> int:
    """The ``index``-th 64 bits of a seed's stream."""
    return mix((mixed_seed + index * GOLDEN) & _MASK)


def signed(value: int) -> int:
    """64 bits as torch's int64 holds them."""
    return value - 2**64 if value >= 2**63 else value
