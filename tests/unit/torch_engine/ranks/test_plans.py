"""A step's plan, written by rank 0 and read by another rank."""

from __future__ import annotations

import random

from trtx.torch_engine.ranks.plans import PlanReader, PlanWriter
from trtx.torch_engine.sampling_plan import SamplingPlan
from trtx.torch_engine.step import FROM_SLOT, Batch, ScheduledSequence


def test_a_reader_finds_all_that_decides_the_forward_in_any_sequence_of_steps() -> None:
    dice = random.Random(0)
    writer, reader = PlanWriter(4), PlanReader(4)
    held: dict[int, list[list[int]]] = {}
    for _ in range(300):
        sequences = []
        for slot in dice.sample(range(4), dice.randint(1, 4)):
            is_first = slot not in held or dice.random() < 0.2
            if is_first:
                held[slot] = [[], []]
            more = dice.randint(0, 3)
            for own in held[slot]:
                own += dice.choices(range(1000), k=more)
            tokens = [FROM_SLOT] if dice.random() < 0.4 else dice.choices(range(1 << 20), k=dice.randint(1, 9))
            plan = SamplingPlan(prompt_logprobs=dice.choice([None, 0, 3]), top_k=5)
            sequences.append(
                ScheduledSequence(
                    slot, is_first, tokens, dice.randint(0, 99), held[slot], dice.random() < 0.5, plan,
                    [1] * dice.randint(1, 20), [], 7, num_drafts=dice.randint(0, len(tokens) - 1),
                )
            )  # fmt: skip
        found = reader.read(writer.write(Batch(sequences))).sequences
        for one, other in zip(found, sequences, strict=True):
            for name in ("slot", "is_first", "new_token_ids", "start", "block_ids", "samples", "num_drafts"):
                assert getattr(one, name) == getattr(other, name), name
            ranks_prompt = other.sampling.prompt_logprobs is not None
            assert (one.sampling.prompt_logprobs is not None) == ranks_prompt
            if ranks_prompt:
                assert len(one.prompt_token_ids) == len(other.prompt_token_ids)
