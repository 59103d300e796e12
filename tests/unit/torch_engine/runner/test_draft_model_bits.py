"""The same bits with a draft model and without: in one engine, over a handoff, with grammars, in another engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from drafting_runners import KINDS, DraftingRunners
from engine_player import (
    Answer,
    Engine,
    Wish,
    accepted,
    connected,
    handoff_workload,
    served,
    served_by_two_engines,
    served_over_a_handoff,
    workload,
)
from examples import first_of
from guided_player import guided_workload, num_whole, served_guided
from runner_player import random_prompt

from trtx.torch_engine.core.speculation.speculation import Speculation

pytestmark = pytest.mark.slow

BOTH, DECODE, PREFILL = (True, True), (False, True), (True, False)
PREFILL_BLOCKS, DECODE_BLOCKS = 60, 11


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DraftingRunners]:
    runners = DraftingRunners(tmp_path_factory.mktemp("models"))
    yield runners
    runners.close()


@pytest.fixture
def ranked(tmp_path: Path) -> Iterator[DraftingRunners]:
    """A process has at most one group of ranks at a time."""
    runners = DraftingRunners(tmp_path, ranks=2)
    yield runners
    runners.close()


def assert_same_bits(found: dict[int, Answer], expected: dict[int, Answer], wishes: list[Wish]) -> None:
    """Tokens, log-probabilities and ends. Of a cancelled request, as much as both have."""
    for index, wish in enumerate(wishes):
        one, other = found[index], expected[index]
        size = None
        if "cancelled" in (one.reason, other.reason):
            size = min(len(one.tokens), len(other.tokens))
        else:
            assert one.reason == other.reason, wish
        assert one.tokens[:size] == other.tokens[:size], wish
        assert one.logprobs[:size] == other.logprobs[:size], wish
        assert size is not None or one.prompt_logprobs == other.prompt_logprobs, wish


def play(runners: DraftingRunners, kind: str, seed: int) -> tuple[int, int, int]:
    """Returns the number of requests, of accepted tokens, and of steps in which a preempted sequence waited."""
    wishes = workload(seed)
    expected, _ = served(runners.get(kind), wishes, overlap=False)
    speculation = runners.always(kind, wishes, expected)
    found, paused = served(runners.get(kind), wishes, overlap=True, speculation=speculation)
    assert_same_bits(found, expected, wishes)
    return len(wishes), accepted(speculation), paused


def play_guided(runners: DraftingRunners, kind: str, seed: int, *, share: float = 0.7) -> tuple[int, int, int]:
    """Returns the number of requests, of accepted tokens, and of whole answers that follow their grammar."""
    wishes = guided_workload(seed, share=share)
    expected = served_guided(runners.get(kind), wishes, overlap=False)
    speculation = runners.always(kind, wishes, expected)
    found = served_guided(runners.get(kind), wishes, overlap=True, speculation=speculation)
    assert_same_bits(found, expected, wishes)
    return len(wishes), accepted(speculation), num_whole(found, wishes)


def play_over_a_handoff(runners: DraftingRunners, kinds: tuple[str, str], seed: int) -> tuple[int, list[int], int]:
    """Returns the number of requests, of accepted tokens of each side, and of steps in which a preempted one waited.

    ``kinds``: the draft model of prefill and of decode.
    """
    wishes = handoff_workload(seed)
    expected, _ = served(runners.get(""), wishes, overlap=False)
    ends = runners.get(kinds[0], PREFILL_BLOCKS), runners.get(kinds[1], DECODE_BLOCKS)
    speculations = (
        runners.always(kinds[0], wishes, expected, PREFILL_BLOCKS),
        runners.always(kinds[1], wishes, expected, DECODE_BLOCKS),
    )
    with connected(ends) as transports:
        decode = served_over_a_handoff(ends, transports, wishes, speculations)
    assert_same_bits(decode.answers, expected, wishes)
    return len(wishes), [accepted(one) for one in speculations], decode.paused


@pytest.mark.parametrize("kind", first_of(1, ["Eagle3", "Draft_Target"]))
def test_all_bits_are_the_same_with_a_draft_model_and_without(runners: DraftingRunners, kind: str) -> None:
    assert play(runners, kind, 3)[1]
    assert play_guided(runners, kind, 0)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_of_two_ranks_drafts_for_both(ranked: DraftingRunners, kind: str) -> None:
    assert play(ranked, kind, 4)[1]
    assert play_guided(ranked, kind, 1)[1]


@pytest.mark.parametrize(
    ("kind", "sides"),
    first_of(
        2,
        [
            ("Eagle3", BOTH),
            ("Draft_Target", DECODE),
            ("Eagle3", PREFILL),
            ("Draft_Target", BOTH),
            ("Eagle3", DECODE),
            ("Draft_Target", PREFILL),
        ],
    ),
)
def test_all_bits_are_the_same_over_a_handoff_whichever_side_has_a_draft_model(
    runners: DraftingRunners, kind: str, sides: tuple[bool, bool]
) -> None:
    _, (by_prefill, by_decode), _ = play_over_a_handoff(
        runners, (kind if sides[0] else "", kind if sides[1] else ""), 21
    )
    assert by_prefill == 0, "prefill samples one token of each request"
    assert bool(by_decode) == sides[1]


@pytest.mark.proof
def test_prefill_and_decode_may_have_different_draft_models(runners: DraftingRunners) -> None:
    assert play_over_a_handoff(runners, ("Eagle3", "Draft_Target"), 22)[1][1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_goes_on_in_another_engine_has_the_same_bits(runners: DraftingRunners, kind: str) -> None:
    wish = Wish(0, random_prompt(10, 0), {"max_tokens": 30}, None)
    expected, _ = served(runners.get(""), [wish], overlap=False)
    speculations: list[Speculation | None] = []

    def new_engine() -> Engine:
        speculations.append(runners.always(kind, [wish], expected))
        return Engine(runners.get(kind), overlap=True, speculation=speculations[-1])

    assert served_by_two_engines(wish, new_engine) == expected[0].tokens
    assert all(map(accepted, speculations))


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
def test_all_bits_of_2000_mixed_requests_are_the_same(runners: DraftingRunners, kind: str) -> None:
    """Greedy, seeded, with penalties, log-probabilities, grammars, prefix hits, stop tokens, cancelled, preempted. A
    third of them are handed over, with a draft model on the prefill side in every other workload."""
    requests = tokens = paused = whole = 0
    for seed in range(200, 258):
        alone, guided = play(runners, kind, seed), play_guided(runners, kind, seed + 200)
        over, by_side, waited = play_over_a_handoff(runners, (kind if seed % 2 else "", kind), seed + 500)
        requests += alone[0] + guided[0] + over
        tokens += alone[1] + guided[1] + by_side[1]
        paused, whole = paused + alone[2] + waited, whole + guided[2]
    print(
        f"{kind}: {requests} requests, {tokens} accepted tokens, {whole} whole answers with a grammar, {paused} pauses"
    )
    assert requests >= 2000 and tokens and paused and whole


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_of_2000_breaks_its_grammar(runners: DraftingRunners, kind: str) -> None:
    whole = tokens = 0
    for seed in itertools.count(1000):
        _, accepted_tokens, num_whole = play_guided(runners, kind, seed, share=1.0)
        whole, tokens = whole + num_whole, tokens + accepted_tokens
        if whole >= 2000:
            break
    print(f"{kind}: {whole} whole answers that follow their grammar, {tokens} accepted tokens")
    assert tokens
