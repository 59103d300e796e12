"""Draft models where prefill and decode are apart: the same tokens, whichever side has one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from eagle_reference import CAPTURED, build_target, head_tensors, save_head
from engine_player import Engine, Wish, assert_equal, served, served_over_a_handoff, workload
from noisy_drafts import save_noisy, with_tokenizer
from runner_player import random_prompt, save

from trtx.torch_engine.core.speculation.create import create_speculation
from trtx.torch_engine.core.speculation.speculation import Speculation
from trtx.torch_engine.handoff import KvTransport, create_transport
from trtx.torch_engine.llm_args import SpeculativeConfig
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import DraftArgs, RunnerArgs, TorchRunner, create_runner

pytestmark = pytest.mark.slow

MOST, STEP_TOKENS = 3, 24
KINDS = ("Draft_Target", "Eagle3")
BOTH, DECODE, PREFILL = (True, True), (False, True), (True, False)


class Runners:
    """Runners of one target model, with the draft models of each kind or none, created when they are first used."""

    def __init__(self, directory: Path) -> None:
        names = ("target", *KINDS)
        for name in names:
            (directory / name).mkdir()
        self._target = with_tokenizer(save(build_target(), directory / "target"))
        save_noisy(build_target(), directory / "Draft_Target")
        save_head(directory / "Eagle3", head_tensors())
        self._drafts = {kind: DraftArgs(kind, str(directory / kind), None) for kind in KINDS}
        self._drafts["Eagle3"] = DraftArgs("Eagle3", str(directory / "Eagle3"), CAPTURED)
        self._created: dict[tuple[str, int], TorchRunner] = {}

    def get(self, kind: str, num_blocks: int) -> TorchRunner:
        """``kind``: of the draft model, or "" for none. 11 blocks hold little more than one long sequence."""
        if (kind, num_blocks) not in self._created:
            self._created[kind, num_blocks] = create_runner(
                RunnerArgs(
                    model_dir=self._target, device="cpu", tokens_per_block=8, num_blocks=num_blocks, max_batch_size=5,
                    max_draft_len=MOST, draft=self._drafts.get(kind),
                )
            )  # fmt: skip
        return self._created[kind, num_blocks]


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> Runners:
    return Runners(tmp_path_factory.mktemp("models"))


def always(runner: TorchRunner, kind: str) -> Speculation | None:
    """Verifies all that the runner's draft model drafts."""
    if not kind:
        return None
    config = SpeculativeConfig(decoding_type=kind, max_draft_len=MOST, draft_len_schedule={5: MOST})
    return create_speculation(config, runner, max_num_tokens=STEP_TOKENS)


@contextmanager
def connected(ends: tuple[TorchRunner, TorchRunner]) -> Iterator[list[KvTransport]]:
    transports = [create_transport(one.pool, one.geometry, routes=["direct"]) for one in ends]
    try:
        yield transports
    finally:
        for one in transports:
            one.close()


def play(runners: Runners, seed: int, kinds: tuple[str, str]) -> tuple[list[int], int, int]:
    """Returns the number of accepted tokens of each side, of requests, and of steps in which a preempted one waited.

    ``kinds``: the draft model of prefill and of decode.
    """
    wishes = [wish for wish in workload(seed) if "prompt_logprobs" not in wish.params]
    expected, _ = served(runners.get("", 11), wishes, overlap=False)
    ends = runners.get(kinds[0], 60), runners.get(kinds[1], 11)
    speculations = always(ends[0], kinds[0]), always(ends[1], kinds[1])
    with connected(ends) as transports:
        decode = served_over_a_handoff(ends, transports, wishes, speculations)
    assert_equal(decode.answers, expected, wishes)
    accepted = [sum(one.counts.accepted) if one is not None else 0 for one in speculations]
    return accepted, len(wishes), decode.paused


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sides", [BOTH, DECODE, PREFILL])
def test_tokens_are_the_same_over_a_handoff_whichever_side_has_a_draft_model(
    runners: Runners, kind: str, sides: tuple[bool, bool]
) -> None:
    by_side, _, _ = play(runners, 21, (kind if sides[0] else "", kind if sides[1] else ""))
    assert by_side[0] == 0, "prefill samples one token of each request"
    assert bool(by_side[1]) == sides[1]


def test_prefill_and_decode_may_have_different_draft_models(runners: Runners) -> None:
    assert play(runners, 22, ("Eagle3", "Draft_Target"))[0][1]


@pytest.mark.proof
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_same_over_a_handoff_in_2000_requests(runners: Runners, kind: str) -> None:
    """Some of them are preempted, and some cancelled after their handoff."""
    requests = paused = 0
    accepted = [0, 0]
    for seed in range(700, 900):
        by_side, count, waited = play(runners, seed, (kind if seed % 2 else "", kind))
        requests, paused = requests + count, paused + waited
        accepted = [one + more for one, more in zip(accepted, by_side, strict=True)]
        if requests >= 2000:
            break
    print(f"{kind}: {requests} requests, {accepted[1]} accepted tokens, {paused} steps with a preempted sequence")
    assert requests >= 2000 and paused and accepted[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_goes_on_in_another_engine_has_the_same_tokens(runners: Runners, kind: str) -> None:
    """As after the death of its worker: Dynamo sends the prompt and the answer so far to another one."""
    wish = Wish(0, random_prompt(10, 0), {"max_tokens": 30}, None)
    expected, _ = served(runners.get("", 11), [wish], overlap=False)
    tokens: list[int] = []
    drafts = []
    for steps in (4, 40):
        runner = runners.get(kind, 11)
        speculation = always(runner, kind)
        engine = Engine(runner, overlap=True, speculation=speculation)
        rest = Wish(0, wish.prompt + tokens, {"max_tokens": 30 - len(tokens)}, None)
        engine.core.submit(Submit(0, rest.prompt, rest.plan))
        for _ in range(steps):
            engine.step()
        tokens += engine.answers[0].tokens
        engine.core.abort([0])
        engine.finish()
        assert speculation is not None
        drafts.append(speculation.counts.drafts)
    assert tokens == expected[0].tokens and all(drafts)
