"""A step's plan as rank 0 sends it to the other ranks: all that they need to compute the same forward, as int32
numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from trtx.torch_engine.sampling_plan import SamplingPlan
from trtx.torch_engine.step import Batch, ScheduledSequence

_FIELDS = 9  # numbers of a sequence before its tokens and blocks
_FIRST, _SAMPLES, _RANKS_PROMPT = 1, 2, 4  # flags


class PlanWriter:
    """Writes plans at rank 0. Remembers how many blocks of each slot the other ranks know."""

    def __init__(self, max_batch_size: int) -> None:
        self._sent = [0] * max_batch_size

    def write(self, batch: Batch) -> bytes:
        plan = array("i", [len(batch.sequences)])
        for one in batch.sequences:
            slot, blocks = one.slot, len(one.block_ids[0])
            known = 0 if one.is_first else self._sent[slot]
            self._sent[slot] = blocks
            ranks_prompt = one.sampling.prompt_logprobs is not None
            flags = one.is_first * _FIRST | one.samples * _SAMPLES | ranks_prompt * _RANKS_PROMPT
            plan.extend((
                slot, flags, one.start, one.num_drafts, len(one.prompt_token_ids), len(one.new_token_ids),
                len(one.block_ids), known, blocks,
            ))  # fmt: skip
            plan.extend(one.new_token_ids)
            for ids in one.block_ids:
                plan.extend(ids[known:])
        return plan.tobytes()


class PlanReader:
    """Reads plans at any other rank. Keeps the blocks of each slot, because a plan has only the added ones."""

    def __init__(self, max_batch_size: int) -> None:
        self._blocks: list[list[list[int]]] = [[] for _ in range(max_batch_size)]

    def read(self, plan: bytes) -> Batch:
        numbers = array("i")
        numbers.frombytes(plan)
        return Batch(list(self._sequences(numbers.tolist())))

    def _sequences(self, numbers: list[int]) -> Iterator[ScheduledSequence]:
        at = 1
        for _ in range(numbers[0]):
            slot, flags, start, num_drafts, num_prompt, num_new, groups, known, blocks = numbers[at : at + _FIELDS]
            at += _FIELDS
            tokens = numbers[at : (at := at + num_new)]
            if flags & _FIRST:
                self._blocks[slot] = [[] for _ in range(groups)]
            for own in self._blocks[slot]:
                own += numbers[at : (at := at + blocks - known)]
            ranks_prompt = bool(flags & _RANKS_PROMPT)
            yield ScheduledSequence(
                slot=slot,
                is_first=bool(flags & _FIRST),
                new_token_ids=tokens,
                start=start,
                block_ids=self._blocks[slot],
                samples=bool(flags & _SAMPLES),
                sampling=_RANKED_PROMPT if ranks_prompt else _PLAIN,
                prompt_token_ids=[0] * num_prompt if ranks_prompt else [],
                output_token_ids=[],
                seed=0,
                num_drafts=num_drafts,
            )


_PLAIN = SamplingPlan()
_RANKED_PROMPT = SamplingPlan(prompt_logprobs=0)
