"""Sampling's definition against softmax in float64 and against what is known by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from trtx.torch_engine.runner.sampling.definition import BANNED, NO_TOKEN, draw, look_up, sample, weights
from trtx.torch_engine.runner.sampling.rows import WEIGHT_BITS, SamplingRow, mix, random_bits
from trtx.torch_engine.sampling_plan import SamplingPlan

pytestmark = pytest.mark.slow


def row(vocab: int, seed: int = 0, **plan: Any) -> SamplingRow:
    return SamplingRow.of(SamplingPlan(**{"is_greedy": False} | plan), seed, 0, vocab)


def drawn(logits: torch.Tensor, count: int, seed: int = 0, **plan: Any) -> list[int]:
    """A request's tokens after ``count`` different numbers of tokens."""
    rows = [row(logits.shape[0], seed, **plan)] * count
    return draw(logits.expand(count, -1).clone(), rows, range(count)).tolist()  # type: ignore[no-any-return]


def kept(logits: torch.Tensor, *, draws: int = 64, **plan: Any) -> list[int]:
    """The ids that come up."""
    return sorted(set(drawn(logits, draws, **plan)))


def kept_in_float64(
    logits: torch.Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """Probabilities by TensorRT-LLM's meaning: ordered by logit, then id; less than ``top_p`` of the mass of top-k
    before; ``min_p`` of the best."""
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    order = logits.sort(descending=True, stable=True).indices[: top_k or None]
    ordered = probabilities[order]
    before = ordered.cumsum(0) - ordered
    is_kept = (before < top_p * ordered.sum()) & (ordered >= min_p * probabilities.max())
    is_kept[0] = True
    left = torch.zeros_like(probabilities).scatter_(0, order[is_kept], ordered[is_kept])
    return left / left.sum()


@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 2, 3, 40, 200]),
    spread=st.sampled_from([0.3, 1.0, 4.0]),
    is_rounded=st.booleans(),
    temperature=st.sampled_from([0.2, 0.8, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 199]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-9]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
@settings(max_examples=examples(40), deadline=None, derandomize=True)
def test_what_comes_up_is_what_float64_keeps(
    seed: int, vocab: int, spread: float, is_rounded: bool, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread
    if is_rounded:
        logits = logits.round()  # ties
    found = torch.tensor(kept(logits, draws=1500, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    # A token whose mass or share lies within a millionth of its limit may be on either side of it.
    fewer, more = (
        kept_in_float64(logits, temperature=temperature, top_k=top_k, top_p=top_p * (1 + e), min_p=min_p * (1 - e))
        for e in (-1e-6, 1e-6)
    )
    assert (more[found] > 0).all()
    missing = torch.ones(vocab, dtype=torch.bool).index_fill_(0, found, False)
    assert (fewer[missing] < 0.02).all()  # 0.98**1500 is 7e-14


@pytest.mark.parametrize(
    "plan",
    [
        {"temperature": 1.5},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 3.0, "top_p": 0.15},
        {"temperature": 2.0, "top_p": 0.7, "min_p": 0.3},
        {"temperature": 2.0, "top_k": 12},
        {"temperature": 2.0, "top_k": 12, "top_p": 0.6},
        {"temperature": 1.0, "min_p": 0.1},
    ],
    ids=str,
)
def test_tokens_come_up_as_often_as_their_probabilities_say(plan: dict[str, float]) -> None:
    """Chi-square; the seeds are fixed, so the answer never changes."""
    count = 20_000
    logits = torch.randn(30, generator=torch.Generator().manual_seed(3)) * 2
    expected = kept_in_float64(logits, **plan) * count  # type: ignore[arg-type]
    is_kept = expected > 0
    seen = torch.bincount(torch.tensor(drawn(logits, count, **plan)), minlength=30)
    assert seen[~is_kept].sum() == 0
    is_many = expected > 5
    chi_square = ((seen - expected) ** 2 / expected)[is_many].sum().item()
    assert chi2.sf(chi_square, int(is_many.sum()) - 1) > 1e-3


@pytest.mark.parametrize("vocab", [3, 151_936])
def test_ties_at_a_limit_are_kept_by_their_ids(vocab: int) -> None:
    equal = torch.full((vocab,), 1.5)
    draws = 12
    assert kept(equal, draws=draws, top_k=2) == [0, 1]
    assert kept(equal, draws=draws, top_p=1e-9) == [0]
    assert kept(equal, draws=draws, top_p=1.5 / vocab) == [0, 1]  # one does not hold it
    assert kept(equal, draws=draws, top_k=1) == [0]
    half = kept(equal, draws=draws, top_p=0.5)
    assert len(half) > 1 and half[-1] < -(-vocab // 2)
    equal[vocab - 1] = 2.0
    assert kept(equal, draws=draws, top_k=2) == [0, vocab - 1]
    assert kept(equal, draws=draws, top_k=1) == kept(equal, draws=draws, min_p=1.0) == [vocab - 1]


def test_top_p_keeps_no_token_before_which_there_is_all_of_it() -> None:
    assert kept(torch.zeros(4), top_p=0.5) == [0, 1]
    assert kept(torch.zeros(4), top_p=0.5 + 2**-50) == [0, 1, 2]
    assert kept(torch.zeros(8), top_p=0.5, top_k=4) == [0, 1]


def test_negative_zero_is_zero() -> None:
    assert kept(torch.tensor([0.0, -0.0, 0.0, -1.0]), top_k=2) == [0, 1]
    assert kept(torch.tensor([-0.0, 0.0, 0.0, -1.0]), top_k=2) == [0, 1]
    assert kept(torch.tensor([-0.0, 0.0, 0.0, -1.0]), top_p=0.3) == [0, 1]


def test_top_p_is_of_what_top_k_kept() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept(logits, top_p=0.72) == [0, 1, 2]
    assert kept(logits, top_p=0.72, top_k=3) == [0, 1]  # 0.7 of 0.9 before the third
    assert kept(logits, top_p=0.72, top_k=2) == [0, 1]
    assert kept(logits, top_p=0.55, top_k=2) == [0]  # 0.57 of 0.7


def test_a_top_k_of_the_whole_vocabulary_restricts_nothing() -> None:
    assert [row(5, top_k=top_k).top_k for top_k in (0, 4, 5, 6, 2**31 - 1)] == [0, 4, 0, 0, 0]
    assert kept(torch.zeros(5), top_k=5) == kept(torch.zeros(5)) == [0, 1, 2, 3, 4]


def test_excluded_and_far_tokens_weigh_nothing() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -1e38, -200.0, 0.0])
    assert kept(logits) == [1, 4]
    for temperature in (5e-324, 1e-46, 1e300, 1.7e308):
        assert kept(torch.tensor([-torch.inf, 0.5, -torch.inf]), temperature=temperature) == [1]
    assert kept(torch.tensor([1.0, 2.0, 2.0]), temperature=5e-324) == [1, 2]
    assert kept(torch.tensor([1.0, 2.0, 2.0]), temperature=1.7e308) == [0, 1, 2]


def test_weights_are_powers_of_two_of_the_distance() -> None:
    logits = torch.linspace(-25, 4, 5001)
    found = weights(logits[None], torch.tensor([[1.25]]))[0].double() / 2**WEIGHT_BITS
    exact = torch.exp2((logits.double() - 4) * 1.25)
    assert found[-1] == 1.0
    large = exact > 2.0**-16
    assert ((found / exact - 1).abs()[large] < 2e-6).all()  # the distance itself is rounded to float32
    assert ((found - exact).abs() < 2e-6).all()
    assert weights(torch.zeros(1, 262_144), torch.ones(1, 1)).sum() == 262_144 << WEIGHT_BITS


def test_a_number_is_looked_up_in_the_sum_of_the_weights() -> None:
    found = torch.tensor([[0, 3, 0, 5, 8]])
    expected = {}
    for index in range(64):
        bits = random_bits(mix(11), index)
        expected[index] = 1 if bits * 16 >> 64 < 3 else 3 if bits * 16 >> 64 < 8 else 4
    assert {index: int(look_up(found, [random_bits(mix(11), index)])) for index in expected} == expected
    assert set(expected.values()) == {1, 3, 4}
    assert look_up(found, [0]).tolist() == [1] and look_up(found, [2**64 - 1]).tolist() == [4]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
@settings(deadline=None)
def test_the_numbers_of_a_seed_are_64_bits_of_their_own(seed: int, index: int) -> None:
    numbers = [random_bits(mix(seed), index + at, attempt) for at in range(3) for attempt in range(3)]
    assert all(0 <= number < 2**64 for number in numbers)
    assert len(set(numbers)) == 9
    assert numbers[0] == random_bits(mix(seed), index)


def test_a_row_without_numbers_or_without_a_token_harms_no_other() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    excluded = torch.full((50,), BANNED, dtype=torch.int32)
    beside = {"top_p": 0.8, "seed": 3}
    rows = [row(50, **beside) for _ in range(5)] + [row(50, is_greedy=True)]
    expected = sample(logits.clone(), rows, [None] * 6, range(6)).tolist()
    logits[1, 40] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    edits = [None, torch.zeros(50, dtype=torch.int32), None, None, excluded, None]
    assert sample(logits, rows, edits, range(6)).tolist() == [expected[0], *[NO_TOKEN] * 4, expected[5]]
    assert (excluded == BANNED).all()
    # A banned id does not hide that the model's logits are no numbers.
    logits[1, 40], only = torch.inf, torch.zeros(50, dtype=torch.int32)
    only[40] = BANNED
    assert sample(logits[1:2], rows[:1], [only], [0]).tolist() == [NO_TOKEN]
