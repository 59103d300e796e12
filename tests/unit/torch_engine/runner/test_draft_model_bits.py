"""The same bits with a draft model and without: in one engine, over a handoff, with grammars, in another engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from drafting_runners import KINDS, DraftingRunners, accepted
from engine_player import Answer, Engine, Wish, served, served_over_a_handoff, workload
from examples import first_of
from guided_player import follows_its_grammar, guided_workload, served_guided
from runner_player import random_prompt

from trtx.torch_engine.handoff import KvTransport, create_transport
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import TorchRunner

pytestmark = pytest.mark.slow

BOTH, DECODE, PREFILL = (True, True), (False, True), (True, False)
PREFILL_BLOCKS, DECODE_BLOCKS = 60, 11


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> DraftingRunners:
    return DraftingRunners(tmp_path_factory.mktemp("models"))


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
    whole = sum(follows_its_grammar(wish, found[index]) for index, wish in enumerate(wishes))
    return len(wishes), accepted(speculation), whole


@contextmanager
def connected(ends: tuple[TorchRunner, TorchRunner]) -> Iterator[list[KvTransport]]:
    transports = [create_transport(one.pool, one.geometry, routes=["direct"]) for one in ends]
    try:
        yield transports
    finally:
        for one in transports:
            one.close()


def play_over_a_handoff(runners: DraftingRunners, kinds: tuple[str, str], seed: int) -> tuple[int, list[int], int]:
    """Returns the number of requests, of accepted tokens of each side, and of steps in which a preempted one waited.

    ``kinds``: the draft model of prefill and of decode.
    """
    wishes = [wish for wish in workload(seed) if "prompt_logprobs" not in wish.params]
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
    """As after the death of its worker: Dynamo sends the prompt and the answer so far to another one."""
    wish = Wish(0, random_prompt(10, 0), {"max_tokens": 30}, None)
    expected, _ = served(runners.get(""), [wish], overlap=False)
    tokens: list[int] = []
    for steps in (4, 40):
        rest = Wish(0, wish.prompt + tokens, {"max_tokens": 30 - len(tokens)}, None)
        speculation = runners.always(kind, [wish], expected)
        engine = Engine(runners.get(kind), overlap=True, speculation=speculation)
        engine.core.submit(Submit(0, rest.prompt, rest.plan))
        for _ in range(steps):
            engine.step()
        tokens += engine.answers[0].tokens
        engine.core.abort([0])
        engine.finish()
        assert accepted(speculation)
    assert tokens == expected[0].tokens


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
