"""The general sampler, on logits made by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.runner.sampler import Sampler
from trtx.torch_engine.step import Sampled, ScheduledSequence

pytestmark = pytest.mark.slow

VOCAB = 40


def sequence(
    slot: int = 0, *, seed: int = 0, prompt: list[int] | None = None, output: list[int] | None = None,
    stops: tuple[int, ...] = (), **params: Any,
) -> ScheduledSequence:  # fmt: skip
    """The last token that it has is new: a sequence that decodes, just come into its slot."""
    plan = resolve_sampling(SamplingParams(**params))
    prompt, output = prompt or [0], output or []
    start = len(prompt) + len(output) - 1
    return ScheduledSequence(slot, True, [(prompt + output)[-1]], start, [[]], True, plan, prompt, output, seed, stops)


def step(sampler: Sampler, logits: torch.Tensor, sequences: list[ScheduledSequence]) -> list[Sampled]:
    sampler.update(sequences)
    slots = torch.tensor([sequence.slot for sequence in sequences], dtype=torch.int32)
    positions = torch.tensor([sequence.start for sequence in sequences], dtype=torch.int32)
    return sampler.collect(logits, sampler.sample(logits, slots, positions), sequences).results()


def sample(logits: torch.Tensor, sequences: list[ScheduledSequence]) -> list[Sampled]:
    return step(Sampler(len(sequences), VOCAB, torch.device("cpu")), logits, sequences)


def token(logits: torch.Tensor, **more: Any) -> int:
    token_id = sample(logits[None], [sequence(**more)])[0].token_id
    assert token_id is not None
    return token_id


def random_logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def counts(logits: torch.Tensor, draws: int = 2000, **params: Any) -> Counter[int]:
    """How often each token comes up over ``draws`` seeds: fixed seeds, so the answer never changes."""
    sequences = [sequence(slot, seed=slot, **params) for slot in range(draws)]
    return Counter(result.token_id or 0 for result in sample(logits.expand(draws, -1), sequences))


@given(st.integers(0, 1000), st.integers(0, 2**32), st.integers(1, VOCAB))
@settings(max_examples=examples(60), deadline=None)
def test_top_k_never_leaves_the_k_likeliest(logits_seed: int, seed: int, top_k: int) -> None:
    logits = random_logits(logits_seed)[0]
    assert token(logits, seed=seed, top_k=top_k, temperature=2.0) in logits.topk(top_k).indices.tolist()


@given(st.integers(0, 1000), st.integers(0, 2**32), st.floats(0.01, 1.0))
@settings(max_examples=examples(60), deadline=None)
def test_top_p_never_leaves_the_smallest_set_that_holds_p(logits_seed: int, seed: int, top_p: float) -> None:
    logits = random_logits(logits_seed)[0]
    ordered, order = torch.softmax(logits.double(), dim=-1).sort(descending=True)
    size = int((ordered.cumsum(0) < top_p - 1e-9).sum()) + 1
    assert token(logits, seed=seed, top_p=top_p) in order[:size].tolist()


@given(st.integers(0, 1000), st.integers(0, 2**32), st.floats(0.01, 1.0))
@settings(max_examples=examples(60), deadline=None)
def test_min_p_never_takes_a_token_below_its_share_of_the_best(logits_seed: int, seed: int, min_p: float) -> None:
    logits = random_logits(logits_seed)[0]
    probabilities = torch.softmax(logits.double(), dim=-1)
    chosen = token(logits, seed=seed, min_p=min_p, temperature=1.0)
    assert probabilities[chosen] >= min_p * probabilities.max() * (1 - 1e-9)


def test_frequencies_follow_the_distribution_at_its_temperature() -> None:
    logits = random_logits(3)[0]
    expected = torch.softmax(logits / 1.5, dim=-1)
    seen = counts(logits, draws=4000, temperature=1.5)
    for index in range(VOCAB):
        spread = 4000 * expected[index] * (1 - expected[index])
        assert abs(seen[index] - 4000 * expected[index]) <= 4 * spread.sqrt() + 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=7), st.integers(0, 2**32))
@settings(max_examples=examples(40), deadline=None)
def test_a_seeded_request_gets_its_token_whatever_else_is_in_the_batch(others: list[int], seed: int) -> None:
    logits = random_logits(seed % 1000, rows=len(others) + 1)
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2, "temperature": 1.0},
        {"repetition_penalty": 1.4},
    ]  # fmt: skip
    asked = {"temperature": 1.3, "top_p": 0.9, "top_k": 20, "seed": seed}
    batch = [sequence(slot, **kinds[kind]) for slot, kind in enumerate(others)]
    batch.append(sequence(len(others), **asked))
    assert sample(logits, batch)[-1].token_id == token(logits[-1], **asked)


def test_the_next_token_of_a_seed_is_drawn_anew() -> None:
    logits = torch.zeros(VOCAB)
    drawn = {token(logits, seed=1, temperature=1.0, output=list(range(length))) for length in range(30)}
    assert len(drawn) > 10


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.0}, {"top_k": 1, "temperature": 5.0}, {"top_p": 0.0, "temperature": 5.0}]
)
def test_greedy_in_every_spelling_is_the_argmax(params: dict[str, Any]) -> None:
    for seed in range(20):
        logits = random_logits(seed)[0]
        assert token(logits, seed=seed, **params) == int(logits.argmax())


def test_banned_ids_are_never_sampled() -> None:
    logits = random_logits(0)[0]
    best, second = logits.topk(2).indices.tolist()
    assert token(logits, stops=(best,)) == second
    assert token(logits) == best
    assert best not in counts(logits, draws=200, stops=(best,), temperature=1.0)


def test_penalties_change_logits_as_their_formulas_say() -> None:
    logits = torch.full((VOCAB,), -50.0)
    logits[3], logits[4], logits[5] = 4.0, 2.1, -1.0
    assert token(logits, output=[3], repetition_penalty=1.8) == 3  # 4 / 1.8 = 2.2
    assert token(logits, output=[3], repetition_penalty=2.0) == 4  # 4 / 2 = 2
    assert token(logits, prompt=[3], repetition_penalty=2.0) == 4
    assert token(logits, output=[3, 3], presence_penalty=1.8) == 3  # once, however often: 2.2
    assert token(logits, output=[3, 3], presence_penalty=2.0) == 4
    assert token(logits, output=[3, 3], frequency_penalty=0.9) == 3  # twice 0.9: 2.2
    assert token(logits, output=[3, 3], frequency_penalty=1.0) == 4
    negative = torch.full((VOCAB,), -50.0)
    negative[3], negative[4] = -1.0, -1.5
    assert token(negative, output=[3], repetition_penalty=2.0) == 4  # a negative logit is multiplied: -2


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = random_logits(7)[0]
    raw = torch.log_softmax(logits, dim=-1)
    best, second, third = logits.topk(3).indices.tolist()
    result = sample(logits[None], [sequence(stops=(best,), temperature=0.0, logprobs=2)])[0]
    assert result.token_id == second and result.logprobs is not None
    assert list(result.logprobs) == [second, best]
    assert result.logprobs[second].rank == 2 and result.logprobs[best].rank == 1
    assert result.logprobs[second].logprob == pytest.approx(raw[second].item())
    alone = sample(logits[None], [sequence(stops=(best, second), logprobs=0)])[0].logprobs
    assert alone is not None and alone[third].rank == 3 and list(alone) == [third]


def test_every_row_gets_as_many_logprobs_as_it_asked_for() -> None:
    logits = random_logits(2, rows=3)
    results = sample(logits, [sequence(0, logprobs=4), sequence(1), sequence(2, logprobs=1, temperature=0.0)])
    assert [None if r.logprobs is None else len(r.logprobs) for r in results] == [4, None, 1]
    assert list(results[0].logprobs or {}) == logits[0].topk(4).indices.tolist()
    assert list(results[2].logprobs or {}) == [int(logits[2].argmax())]


_NUMBERS = st.one_of(
    st.floats(0, allow_nan=False, allow_infinity=False), st.sampled_from([0.0, 5e-324, 1e-46, 1.0, 1.7e308])
)
_SHARES = st.one_of(st.floats(0, 1), st.sampled_from([5e-324, 1.0 - 2**-53]))
_SIGNED = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([-1.7e308, 1.7e308]))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": _NUMBERS, "top_k": st.integers(0, 2**70), "top_p": _SHARES, "min_p": _SHARES,
            "repetition_penalty": _NUMBERS.filter(lambda value: value > 0), "presence_penalty": _SIGNED,
            "frequency_penalty": _SIGNED, "seed": st.integers(0, 2**64 - 1), "logprobs": st.integers(0, 1024),
        },
    ),
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -3.0, 88.0, 3e38, -3e38, 1e-45, -torch.inf]), min_size=4, max_size=4),
    st.sampled_from([None, torch.nan, torch.inf]),
)  # fmt: skip
@settings(max_examples=examples(100), deadline=None, derandomize=True)
def test_parameters_at_their_limits_give_a_token_and_change_no_other(
    params: dict[str, Any], extreme: list[float], broken: float | None
) -> None:
    logits = random_logits(5, rows=3)
    logits[1, 10:14] = torch.tensor(extreme)
    logits[1, 14:] = -torch.inf
    if broken is not None:
        logits[1, 12] = broken
    beside: list[dict[str, Any]] = [
        {"seed": 1, "top_p": 0.9}, {"seed": 2, "repetition_penalty": 1.3, "output": [4, 4]}
    ]  # fmt: skip
    alone = [sample(logits[[at]], [sequence(**asked)])[0] for at, asked in zip((0, 2), beside, strict=True)]
    batch = [sequence(0, **beside[0]), sequence(1, prompt=[3, 3, 12], **params), sequence(2, **beside[1])]
    first, found, third = sample(logits, batch)
    assert [first.token_id, third.token_id] == [one.token_id for one in alone]
    assert (found.error is None) is (broken is None), found.error
    assert found.error is not None or logits[1, found.token_id or 0] > -torch.inf


def test_a_slot_taken_by_another_sequence_samples_by_its_own_parameters() -> None:
    sampler, logits = Sampler(1, VOCAB, torch.device("cpu")), random_logits(0)
    first, second, third = logits[0].topk(3).indices.tolist()
    assert step(sampler, logits, [sequence(stops=(first,))])[0].token_id == second
    assert step(sampler, logits, [sequence(stops=(first, second))])[0].token_id == third
    assert step(sampler, logits, [sequence(temperature=5.0, seed=4)])[0].token_id == token(
        logits[0], temperature=5.0, seed=4
    )
    assert step(sampler, logits, [sequence()])[0].token_id == first


def test_ids_that_are_banned_no_longer_come_back() -> None:
    sampler, logits = Sampler(1, VOCAB, torch.device("cpu")), random_logits(0)
    first, second = logits[0].topk(2).indices.tolist()
    one = sequence(stops=(first,))
    assert step(sampler, logits, [one])[0].token_id == second
    one.is_first, one.banned_ids = False, ()
    assert step(sampler, logits, [one])[0].token_id == first


def test_counts_kept_from_step_to_step_are_those_of_the_whole_sequence() -> None:
    """And another sequence in the slot starts with its own, as does one that has been preempted."""
    generator = torch.Generator().manual_seed(0)
    kept = Sampler(2, VOCAB, torch.device("cpu"))
    asked = {"temperature": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.1}
    for life, stop in enumerate((12, 5, 8, 8, 8)):
        prompt, output = [1, 2, 2, 3, 3, life], list[int]()
        stops = (3, 4)
        for at in range(stop):
            logits = torch.randn(1, VOCAB, generator=generator) * 2
            logits[:, 6:] -= 30  # the others come again and again
            if at == 3:
                stops = ()
            one = sequence(1, seed=7, prompt=prompt, output=output, stops=stops, **asked)
            anew = step(Sampler(2, VOCAB, torch.device("cpu")), logits, [one])[0].token_id
            one.is_first = at in (0, 8)
            if not one.is_first:
                one.output_token_ids = output[:-1]  # as far as the host has them
            found = step(kept, logits, [one])[0].token_id
            assert found == anew and found is not None and found not in stops
            output.append(found)
