"""The sampling kernels, token for token against their definition in torch.

Without a GPU: TRITON_INTERPRET=1 and the package triton.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from kernel_cases import DEVICE, IS_INTERPRETED

from trtx.torch_engine.runner.sampling import definition
from trtx.torch_engine.runner.sampling.definition import BANNED, NO_TOKEN
from trtx.torch_engine.runner.sampling.rows import SamplingRow
from trtx.torch_engine.runner.sampling.slots import new_edits
from trtx.torch_engine.sampling_plan import SamplingPlan
from trtx.torch_engine.step import FROM_SLOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or IS_INTERPRETED), reason="needs CUDA or TRITON_INTERPRET=1"),
]
# Each is compiled anew.
SHAPES = (
    list(itertools.product([1, 3, 211, 9000], [torch.float32, torch.bfloat16, torch.float16]))
    if IS_INTERPRETED
    else [
        (211, torch.float32), (211, torch.float16), (9000, torch.bfloat16), (151_936, torch.bfloat16),
        (151_936, torch.float32),
    ]
)  # fmt: skip
ROWS = 3 if IS_INTERPRETED else 24
PROMPT = 5


class Case:
    """Rows of a batch, and what the kernels and torch make of them."""

    def __init__(self, logits: torch.Tensor, plans: list[SamplingPlan], edits: list[torch.Tensor | None]) -> None:
        self.vocab = logits.shape[1]
        self.logits = logits.to(DEVICE)
        self.rows = [
            SamplingRow.of(plan, seed * 0x9E3779B97F4A7C15 % 2**64, PROMPT, self.vocab)
            for seed, plan in enumerate(plans)
        ]
        self.edits = edits
        self.positions = [PROMPT - 1 + at * at for at in range(len(plans))]

    def by_kernels(self, order: list[int] | None = None) -> tuple[list[int], list[torch.Tensor | None]]:
        """Tokens and edits after them; ``order``: of the rows in the batch."""
        from trtx.torch_engine.runner.sampling.triton_sampling import TritonSampling

        order = order or list(range(len(self.rows)))
        edits = [None if edit is None else new_edits(self.vocab, DEVICE).copy_(edit) for edit in self.edits]
        fields = [
            row.fields(0 if edit is None else edit.data_ptr()) for row, edit in zip(self.rows, edits, strict=True)
        ]
        last_tokens = torch.full((len(fields),), -7, dtype=torch.int32, device=DEVICE)
        kernels = TritonSampling(torch.tensor(fields, dtype=torch.int64, device=DEVICE), last_tokens, self.vocab)
        tokens = torch.full((len(order),), -7, dtype=torch.int64, device=DEVICE)
        kernels.sample(
            tokens, self.logits[order], torch.tensor(order, dtype=torch.int32, device=DEVICE),
            torch.tensor([self.positions[at] for at in order], dtype=torch.int32, device=DEVICE),
        )  # fmt: skip
        found = dict(zip(order, tokens.tolist(), strict=True))
        assert last_tokens.tolist() == [max(found[slot], 0) if slot in found else -7 for slot in range(len(fields))]
        slots = torch.tensor(order, dtype=torch.int32, device=DEVICE)
        given = torch.where(slots % 2 == 0, FROM_SLOT, slots)
        expected = [max(found[slot], 0) if slot % 2 == 0 else slot for slot in order]
        assert kernels.fill(given, slots).tolist() == expected
        return [found[at] for at in range(len(order))], [None if edit is None else edit.cpu() for edit in edits]

    def by_torch(self) -> tuple[list[int], list[torch.Tensor | None]]:
        edits = [None if edit is None else edit.clone() for edit in self.edits]
        indices = [row.index(position) for row, position in zip(self.rows, self.positions, strict=True)]
        tokens = definition.sample(self.logits.cpu().float().clone(), self.rows, edits, indices)
        return tokens.tolist(), edits

    def check(self) -> None:
        tokens, edits = self.by_kernels()
        expected, expected_edits = self.by_torch()
        assert tokens == expected, [(at, self.rows[at]) for at in range(len(tokens)) if tokens[at] != expected[at]]
        for edit, other in zip(edits, expected_edits, strict=True):
            assert (edit is None and other is None) or torch.equal(edit, other)  # type: ignore[arg-type]


def plans_of(dice: random.Random, vocab: int, rows: int) -> list[SamplingPlan]:
    return [
        SamplingPlan(
            is_greedy=dice.random() < 0.1,
            temperature=dice.choice([0.8, 1.0, 0.1, 2.0, 5e-324, 1e-30, 1e30, 1.7e308]),
            top_k=dice.choice([0, 0, 1, 2, 50, 100, 500, vocab - 1, vocab, 2**31 - 1]),
            top_p=dice.choice([1.0, 1.0, 0.95, 0.5, 0.1, 1e-9, 0.999]),
            min_p=dice.choice([0.0, 0.0, 0.01, 0.5, 1.0]),
            repetition_penalty=dice.choice([1.0, 1.3, 0.7, 1e-38, 3e38]),
            presence_penalty=dice.choice([0.0, 0.5, -3e38]),
            frequency_penalty=dice.choice([0.0, 0.1, -0.2, 3e38]),
        )
        for _ in range(rows)
    ]


def edits_of(dice: random.Random, vocab: int) -> torch.Tensor | None:
    if dice.random() < 0.6:
        return None
    edits = torch.zeros(vocab, dtype=torch.int32)
    for _ in range(min(vocab, 30)):
        edits[dice.randrange(vocab)] = dice.choice([1, 2, 7])
    for _ in range(2):
        edits[dice.randrange(vocab)] = BANNED
    return edits


@pytest.mark.parametrize(("vocab", "dtype"), SHAPES)
@pytest.mark.parametrize("kind", ["flat", "peaked", "equal", "rounded", "far apart", "mostly excluded"])
def test_tokens_are_those_of_the_definition(vocab: int, dtype: torch.dtype, kind: str) -> None:
    dice = random.Random(f"{vocab} {dtype} {kind}")
    rows = ROWS if vocab < 100_000 else 10  # the definition takes its time
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(dice.randrange(2**32)))
    match kind:
        case "peaked":
            logits *= 6
        case "equal":
            logits *= 0  # of either sign
        case "rounded":
            logits = (logits * 2).round()
        case "far apart":
            logits *= 1e4
        case "mostly excluded":
            logits[:, torch.randperm(vocab)[: vocab * 9 // 10]] = -torch.inf
    Case(logits.to(dtype), plans_of(dice, vocab, rows), [edits_of(dice, vocab) for _ in range(rows)]).check()


@pytest.mark.parametrize(("vocab", "rows"), [(211, 24), (9000, ROWS)])
def test_top_p_of_flat_logits_is_drawn_in_several_attempts(vocab: int, rows: int) -> None:
    dice = random.Random(2)
    plans = [
        SamplingPlan(
            is_greedy=False, top_p=dice.choice([0.95, 0.5, 0.1, 0.01]), min_p=dice.choice([0.0, 0.2]),
            top_k=dice.choice([0, 0, 60, 4000]), repetition_penalty=dice.choice([1.0, 1.0, 1.5]),
        )
        for _ in range(rows)
    ]  # fmt: skip
    edits = [torch.arange(vocab, dtype=torch.int32) % 3 if plan.has_penalties else None for plan in plans]
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(2))
    Case(logits.to(torch.float32 if vocab == 211 else torch.bfloat16), plans, edits).check()


@pytest.mark.parametrize("finite", [2, 8, 9000])
def test_equal_tokens_at_a_limit(finite: int) -> None:
    """Of 9,000 of them the groups do not tell the first ones."""
    logits = torch.full((16, 9000), -torch.inf)
    logits[:, :: 9000 // finite] = 1.5
    plans = [
        SamplingPlan(is_greedy=False, top_k=top_k, top_p=top_p)
        for top_k in (1 if finite == 9000 else 0, 2, 4, 8)
        for top_p in (0.5, 0.25, 0.5, 0.5)
    ]
    Case(logits.bfloat16(), plans, [None] * 16).check()


def test_top_k_beyond_the_largest_groups() -> None:
    """141 groups, of which one program holds 128."""
    logits = torch.randn(8, 9000, generator=torch.Generator().manual_seed(5)) * 0.1
    plans = [
        SamplingPlan(is_greedy=False, top_k=top_k, temperature=5.0)
        for top_k in (128, 129, 140, 141, 142, 150, 900, 8999)
    ]
    Case(logits.bfloat16(), plans, [None] * 8).check()


def test_a_row_is_sampled_alike_wherever_it_stands() -> None:
    dice = random.Random(1)
    edits = [edits_of(dice, 9000) for _ in range(ROWS)]
    case = Case(torch.randn(ROWS, 9000).bfloat16(), plans_of(dice, 9000, ROWS), edits)
    order = list(range(ROWS))
    dice.shuffle(order)
    assert case.by_kernels(order)[0] == case.by_kernels()[0]


def test_rows_without_numbers_or_without_a_token_have_none() -> None:
    """And plain rows beside them keep their best."""
    vocab = 211
    logits = torch.randn(6, vocab)
    logits[1, 200] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    asked: dict[str, Any] = {"is_greedy": False, "top_p": 0.9}
    plans = [SamplingPlan(**asked) for _ in range(5)]
    plans.append(SamplingPlan())
    excluded = torch.full((vocab,), BANNED, dtype=torch.int32)
    case = Case(logits, plans, [None, torch.zeros_like(excluded), None, None, excluded, None])
    tokens, _ = case.by_kernels()
    assert [token == NO_TOKEN for token in tokens] == [False, True, True, True, True, False]
    assert tokens[5] == int(case.logits[5].argmax())
