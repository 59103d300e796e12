"""The whole engine over a real model: the very tokens that no speculation would give, whatever is drafted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from engine_player import (
    Answer,
    Engine,
    Wish,
    accepted,
    assert_equal,
    connected,
    handoff_workload,
    served,
    served_by_two_engines,
    served_over_a_handoff,
    workload,
)
from examples import first_of
from guided_player import guided_workload, num_whole, served_guided
from knowing_drafter import KnowingDrafter
from runner_player import VOCAB, build, random_prompt, save, small_runner

from trtx.torch_engine.core.speculation.drafters import Drafter, NGramDrafter
from trtx.torch_engine.core.speculation.lengths import DraftLengths
from trtx.torch_engine.core.speculation.sources import LookupDrafts
from trtx.torch_engine.core.speculation.speculation import Speculation
from trtx.torch_engine.core.speculation.suffixes import SuffixDrafter
from trtx.torch_engine.handoff import KvTransport
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner

pytestmark = pytest.mark.slow

MOST = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3"), tmp_path_factory.mktemp("checkpoint"))


# 11 blocks of 8 tokens: one sequence of the longest kind, and little more, so that sequences are preempted.
new_runner = partial(small_runner, num_blocks=11, guided=True, max_draft_len=MOST)


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> TorchRunner:
    return new_runner(checkpoint)


def n_grams(*, is_public_pool: bool = True) -> NGramDrafter:
    return NGramDrafter(
        max_matching_ngram_size=2, is_keep_all=True, is_use_oldest=True, is_public_pool=is_public_pool
    )  # fmt: skip


def knowing(wishes: list[Wish], answers: dict[int, Answer], *, right: float = 0.8) -> KnowingDrafter:
    known = [wish.prompt + answers[index].tokens for index, wish in enumerate(wishes)]
    return KnowingDrafter(known, right=right, vocab_size=VOCAB)


def always(drafter: Drafter, *, is_asynchronous: bool = False) -> Speculation:
    """Verifies all that is drafted."""
    return Speculation(LookupDrafts(drafter), DraftLengths(MOST, schedule={5: MOST}), is_asynchronous=is_asynchronous)


DRAFTERS: dict[str, Callable[[list[Wish], dict[int, Answer]], Drafter]] = {
    "knowing": knowing,
    "NGram": lambda wishes, answers: n_grams(),
    "SA": lambda wishes, answers: SuffixDrafter(max_matching_ngram_size=-1),
}


def play(runner: TorchRunner, seed: int, drafter: str) -> Speculation:
    wishes = workload(seed)
    expected, _ = served(runner, wishes, overlap=False)
    speculation = always(DRAFTERS[drafter](wishes, expected))
    found, _ = served(runner, wishes, overlap=True, speculation=speculation)
    assert_equal(found, expected, wishes)
    return speculation


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("seed", first_of(1, [1, 0, 3]))
def test_tokens_are_the_same_with_and_without_speculation(runner: TorchRunner, seed: int, drafter: str) -> None:
    speculation = play(runner, seed, drafter)
    assert accepted(speculation)
    assert sum(speculation.counts.drafted) > accepted(speculation), "no guess was wrong"


@pytest.mark.proof
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_the_same_with_and_without_speculation_in_many_workloads(runner: TorchRunner, drafter: str) -> None:
    """2,100 requests for each drafter."""
    for seed in range(200, 350):
        play(runner, seed, drafter)


@pytest.fixture(scope="module")
def prefill_runner(checkpoint: Path) -> TorchRunner:
    return new_runner(checkpoint, num_blocks=60)


@pytest.fixture
def transports(prefill_runner: TorchRunner, runner: TorchRunner) -> Iterator[list[KvTransport]]:
    with connected((prefill_runner, runner)) as ends:
        yield ends


def play_over_a_handoff(
    runners: tuple[TorchRunner, TorchRunner],
    transports: list[KvTransport],
    seed: int,
    drafter: str,
    sides: tuple[bool, bool],
) -> tuple[list[int], int]:
    """Returns the number of accepted tokens of each side, and the steps in which a preempted sequence waited."""
    wishes = handoff_workload(seed)
    expected, _ = served(runners[1], wishes, overlap=False)
    speculations = tuple(always(DRAFTERS[drafter](wishes, expected)) if speculates else None for speculates in sides)
    decode = served_over_a_handoff(runners, transports, wishes, (speculations[0], speculations[1]))
    assert_equal(decode.answers, expected, wishes)
    return [accepted(one) for one in speculations], decode.paused


DECODE, BOTH, PREFILL = (False, True), (True, True), (True, False)


@pytest.mark.parametrize(
    ("drafter", "sides"), [("knowing", DECODE), ("knowing", PREFILL), ("NGram", BOTH), ("SA", BOTH)]
)
def test_tokens_are_the_same_over_a_handoff_whichever_side_speculates(
    prefill_runner: TorchRunner,
    runner: TorchRunner,
    transports: list[KvTransport],
    drafter: str,
    sides: tuple[bool, bool],
) -> None:
    (by_prefill, by_decode), _ = play_over_a_handoff((prefill_runner, runner), transports, 21, drafter, sides)
    assert by_prefill == 0, "prefill samples one token of each request"
    assert bool(by_decode) == sides[1]


@pytest.mark.proof
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_the_same_over_a_handoff_in_many_workloads(
    prefill_runner: TorchRunner, runner: TorchRunner, transports: list[KvTransport], drafter: str
) -> None:
    """About 2,000 requests for each drafter, some preempted and some cancelled after their handoff."""
    paused = 0
    for seed in range(700, 870):
        sides = (seed % 2 == 0, True)
        paused += play_over_a_handoff((prefill_runner, runner), transports, seed, drafter, sides)[1]
    assert paused, "nothing was preempted"


def test_a_request_that_goes_on_in_another_engine_has_the_same_tokens(runner: TorchRunner) -> None:
    wish = Wish(0, random_prompt(10, 0), {"max_tokens": 30}, None)
    expected, _ = served(runner, [wish], overlap=False)
    speculations: list[Speculation] = []

    def new_engine() -> Engine:
        speculations.append(always(knowing([wish], expected)))
        return Engine(runner, overlap=True, speculation=speculations[-1])

    assert served_by_two_engines(wish, new_engine) == expected[0].tokens
    assert all(map(accepted, speculations))


def play_guided(runner: TorchRunner, seed: int) -> tuple[int, int]:
    """Returns the number of accepted tokens, and of whole answers that follow their grammar."""
    wishes = guided_workload(seed)
    expected = served_guided(runner, wishes, overlap=False)
    speculation = always(knowing(wishes, expected))
    found = served_guided(runner, wishes, overlap=True, speculation=speculation)
    assert_equal(found, expected, wishes)
    return accepted(speculation), num_whole(found, wishes)


@pytest.mark.parametrize("seed", [0, 1])
def test_guided_tokens_are_the_same_with_and_without_speculation(runner: TorchRunner, seed: int) -> None:
    num_accepted, whole = play_guided(runner, seed)
    assert num_accepted > 10 and whole


@pytest.mark.proof
def test_guided_tokens_are_the_same_with_and_without_speculation_in_many_workloads(runner: TorchRunner) -> None:
    """2,070 requests."""
    for seed in range(400, 630):
        play_guided(runner, seed)


@pytest.mark.proof
@pytest.mark.parametrize("drafter", ["NGram", "SA"])
def test_no_answer_of_2000_breaks_its_grammar(runner: TorchRunner, drafter: str) -> None:
    whole, speculation = 0, always(DRAFTERS[drafter]([], {}))
    for seed in itertools.count(1000):
        wishes = guided_workload(seed, share=1.0)
        whole += num_whole(served_guided(runner, wishes, overlap=True, speculation=speculation), wishes)
        if whole >= 2000:
            break
    assert accepted(speculation) > 1000


def test_a_deterministic_engine_gives_the_same_logprobs_to_the_last_bit(checkpoint: Path) -> None:
    runner = new_runner(checkpoint, deterministic=True)
    wishes = [
        Wish(index, random_prompt(9 + index, index), kind | {"max_tokens": 10, "logprobs": 2, "seed": index}, None)
        for index, kind in enumerate(({}, {"temperature": 1.0}, {"temperature": 1.0, "frequency_penalty": 0.5}))
    ]
    expected, _ = served(runner, wishes, overlap=False)
    speculation = always(knowing(wishes, expected))
    found, _ = served(runner, wishes, overlap=True, speculation=speculation)
    assert accepted(speculation) > 10
    for index in range(len(wishes)):
        assert found[index] == expected[index]


def test_overlap_goes_on_where_nothing_is_drafted_and_tokens_are_the_same(runner: TorchRunner) -> None:
    """As on a GPU: the step in flight is waited for where a draft is likely, and only there."""
    wishes = workload(3)
    expected, _ = served(runner, wishes, overlap=False)
    speculation = always(knowing(wishes, expected), is_asynchronous=True)
    found, _ = served(runner, wishes, overlap=True, speculation=speculation)
    assert_equal(found, expected, wishes)
    assert accepted(speculation)


def test_a_padded_pass_gives_the_same_tokens(checkpoint: Path, runner: TorchRunner) -> None:
    wishes = workload(1)
    expected, _ = served(runner, wishes, overlap=False)
    padded = create_runner(
        RunnerArgs(
            model_dir=checkpoint, device="cpu", tokens_per_block=8, num_blocks=11, max_batch_size=5,
            max_draft_len=MOST, merges_passes=True, pass_sizes=(4, 8, 24),
        )
    )  # fmt: skip
    speculation = always(knowing(wishes, expected))
    found, _ = served(padded, wishes, overlap=True, speculation=speculation)
    assert_equal(found, expected, wishes)
    assert accepted(speculation)


def test_a_right_draft_saves_steps_and_one_beyond_the_limits_is_not_made(runner: TorchRunner) -> None:
    wish = Wish(0, random_prompt(10, 0), {"max_tokens": 9}, None)
    expected, _ = served(runner, [wish], overlap=False)
    speculation = always(knowing([wish], expected, right=1.0))
    engine = Engine(runner, overlap=True, speculation=speculation)
    engine.core.submit(Submit(0, wish.prompt, wish.plan))
    engine.finish()
    assert engine.answers[0].tokens == expected[0].tokens
    # The prompt's step samples one token; 3 + 1 and 3 + 1 follow, and no step has room for a token beyond the ninth.
    assert (speculation.counts.drafts, speculation.counts.accepted) == (2, [2, 2, 2])


def test_nothing_is_drafted_above_max_concurrency(runner: TorchRunner) -> None:
    wishes = [Wish(0, random_prompt(8, index), {"max_tokens": 8}, None) for index in range(3)]
    expected, _ = served(runner, wishes, overlap=False)
    lengths = DraftLengths(MOST, max_concurrency=2)
    speculation = Speculation(LookupDrafts(knowing(wishes, expected)), lengths, is_asynchronous=False)
    found, _ = served(runner, wishes, overlap=True, speculation=speculation)
    assert_equal(found, expected, wishes)
    assert speculation.counts.drafts == 0
