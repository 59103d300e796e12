"""The sampling of ``benchmarks/device_sampling`` against softmax in float64 and against what is known by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[4] / "benchmarks"))
from device_sampling.definition import draw, kept_weights, weights
from device_sampling.rows import WEIGHT_BITS, SamplingRow, mix, random_bits
from device_sampling.sampler import DeviceSampler

from trtx.torch_engine.batch import ScheduledSequence
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.runner.sampler import best_tokens
from trtx.torch_engine.sampling_plan import SamplingPlan


def row(vocab: int, seed: int = 0, **plan: Any) -> SamplingRow:
    return SamplingRow.of(SamplingPlan(is_greedy=False, **plan), seed, vocab)


def kept(logits: torch.Tensor, **plan: Any) -> list[int]:
    """The ids that are kept of one row."""
    found = kept_weights(logits[None], [row(logits.shape[0], **plan)])
    return found[0].nonzero().flatten().tolist()  # type: ignore[no-any-return]


def kept_in_float64(logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """By the definition: ordered by logit, then id; less than ``top_p`` of the mass before; ``min_p`` of the best."""
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    order = logits.sort(descending=True, stable=True).indices[: top_k or None]
    ordered = probabilities[order]
    before = ordered.cumsum(0) - ordered
    is_kept = (before < top_p * ordered.sum()) | (torch.arange(len(order)) == 0)
    return set(order[is_kept & (ordered >= min_p * probabilities.max())].tolist())


@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 2, 3, 40, 1000]),
    spread=st.sampled_from([0.3, 1.0, 4.0]),
    is_rounded=st.booleans(),
    temperature=st.sampled_from([0.2, 0.8, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 999]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-9]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_what_is_kept_is_what_float64_keeps(
    seed: int, vocab: int, spread: float, is_rounded: bool, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread
    if is_rounded:
        logits = logits.round()  # ties
    asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    found = set(kept(logits, **asked))
    # A token whose mass or share lies within a millionth of its limit may be on either side of it.
    sides = [
        kept_in_float64(logits, temperature=temperature, top_k=top_k, top_p=top_p * (1 + e), min_p=min_p * (1 - e))
        for e in (-1e-6, 1e-6)
    ]
    assert sides[0] <= found <= sides[1]


@pytest.mark.parametrize("vocab", [3, 151_936])
def test_ties_at_a_limit_are_kept_by_their_ids(vocab: int) -> None:
    equal = torch.full((vocab,), 1.5)
    assert kept(equal, top_k=2) == [0, 1]
    assert kept(equal, top_p=1e-9) == [0]
    assert kept(equal, top_p=1.5 / vocab) == [0, 1]  # one does not hold it
    assert kept(equal, min_p=1.0) == list(range(vocab))
    assert kept(equal, top_p=0.5) == list(range(-(-vocab // 2)))
    equal[vocab - 1] = 2.0
    assert kept(equal, top_k=2) == [0, vocab - 1]
    assert kept(equal, top_k=1) == kept(equal, min_p=1.0) == [vocab - 1]


def test_negative_zero_is_zero() -> None:
    assert kept(torch.tensor([0.0, -0.0, 0.0, -1.0]), top_k=2) == [0, 1]
    assert kept(torch.tensor([-0.0, 0.0, 0.0, -1.0]), top_k=2) == [0, 1]


def test_top_p_is_of_what_top_k_kept() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept(logits, top_p=0.72) == [0, 1, 2]
    assert kept(logits, top_p=0.72, top_k=3) == [0, 1]  # 0.7 of 0.9 before the third
    assert kept(logits, top_p=0.72, top_k=2) == [0, 1]
    assert kept(logits, top_p=0.55, top_k=2) == [0]  # 0.57 of 0.7


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


def test_the_number_is_looked_up_in_the_sum_of_the_weights() -> None:
    found = torch.tensor([[0, 3, 0, 5, 8]])
    drawn = {}
    for index in range(64):
        bits = random_bits(mix(11), index)
        drawn[index] = 1 if bits * 16 >> 64 < 3 else 3 if bits * 16 >> 64 < 8 else 4
    one = row(5, seed=11)
    assert {index: int(draw(found, [one], [index])) for index in drawn} == drawn
    assert set(drawn.values()) == {1, 3, 4}


def test_counts_kept_from_step_to_step_are_those_of_the_whole_sequence() -> None:
    """And another sequence in the slot starts with its own, as does one that has been preempted."""
    cpu, vocab = torch.device("cpu"), 30
    generator = torch.Generator().manual_seed(0)
    kept_sampler = DeviceSampler(2, vocab, cpu)
    for life, stop in enumerate((12, 5)):
        prompt, output = [1, 2, 2, life], list[int]()
        sampling = resolve_sampling(SamplingParams(temperature=0.5, frequency_penalty=0.7, repetition_penalty=1.2))
        for step in range(stop):
            logits = torch.randn(1, vocab, generator=generator) * 2
            banned = (3, 4) if step < 3 else ()
            sequence = ScheduledSequence(1, step == 0, [0], 3, [], True, sampling, prompt, output, 7, banned)
            greedy = best_tokens(logits)
            token = DeviceSampler(2, vocab, cpu).sample(logits, greedy, [sequence])[0].token_id
            for _ in range(2 if step == 4 else 1):  # a step that failed is done again, row by row
                assert kept_sampler.sample(logits, greedy, [sequence])[0].token_id == token
                assert kept_sampler._rows._held[1].counted == len(prompt) + len(output) + 1  # type: ignore[union-attr]
            edits = kept_sampler._rows._held[1].edits  # type: ignore[union-attr]
            assert token is not None and token not in banned and edits is not None
            output.append(token)
            assert edits.clamp(min=0).tolist() == [
                0 if at in banned else (prompt + output).count(at) for at in range(vocab)
            ]
