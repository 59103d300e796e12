"""The whole engine over a real model: the same tokens with and without a step under way, whatever comes in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from engine_player import (
    Engine,
    Wish,
    assert_equal,
    connected,
    handoff_workload,
    served,
    served_over_a_handoff,
    workload,
)
from examples import first_of
from runner_player import build, random_prompt, save, small_runner

from trtx.torch_engine.handoff import KvTransport, create_transport
from trtx.torch_engine.messages import Handoff, Submit
from trtx.torch_engine.runner import TorchRunner

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3"), tmp_path_factory.mktemp("checkpoint"))


# 11 blocks of 8 tokens: one sequence of the longest kind, and little beside it.
new_runner = partial(small_runner, num_blocks=11)


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> TorchRunner:
    return new_runner(checkpoint)


@pytest.mark.proof
def test_tokens_are_the_same_with_and_without_overlap_in_many_workloads(runner: TorchRunner) -> None:
    for seed in range(100, 200):
        wishes = workload(seed)
        assert_equal(served(runner, wishes, overlap=True)[0], served(runner, wishes, overlap=False)[0], wishes)


@pytest.mark.parametrize("seed", first_of(1, [0, 1, 3]))
def test_tokens_are_the_same_with_and_without_overlap(runner: TorchRunner, seed: int) -> None:
    wishes = workload(seed)
    expected, _ = served(runner, wishes, overlap=False)
    found, paused = served(runner, wishes, overlap=True)
    assert_equal(found, expected, wishes)
    assert paused, "nothing was preempted"
    assert {"length", "stop", "cancelled"} <= {answer.reason for answer in found.values()}


@pytest.fixture(scope="module")
def runners(checkpoint: Path) -> tuple[TorchRunner, TorchRunner]:
    return new_runner(checkpoint, num_blocks=60), new_runner(checkpoint)


@pytest.fixture
def transports(runners: tuple[TorchRunner, TorchRunner]) -> Iterator[list[KvTransport]]:
    with connected(runners) as ends:
        yield ends


@pytest.mark.parametrize("seed", first_of(1, range(2)))
def test_tokens_are_the_same_over_a_handoff(
    runner: TorchRunner, runners: tuple[TorchRunner, TorchRunner], transports: list[KvTransport], seed: int
) -> None:
    wishes = handoff_workload(20 + seed)
    expected, _ = served(runner, wishes, overlap=False)
    decode = served_over_a_handoff(runners, transports, wishes)
    assert_equal(decode.answers, expected, wishes)


@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_preempted_after_its_handoff_does_not_read_blocks_that_are_anothers(
    checkpoint: Path, overlap: bool
) -> None:
    """Two answers that outgrow the decode side's pool, while the prefill side fills its own with other prompts."""
    wishes = [Wish(0, random_prompt(20, 100 + index), {"max_tokens": 40}, None) for index in range(2)]
    expected, _ = served(new_runner(checkpoint, num_blocks=60), wishes, overlap=False)
    runners = new_runner(checkpoint, num_blocks=60), new_runner(checkpoint)
    ends = [create_transport(runner.pool, runner.geometry, routes=["direct"]) for runner in runners]
    prefill, decode = (
        Engine(runner, overlap=overlap, transport=end) for runner, end in zip(runners, ends, strict=True)
    )
    for step in range(2000):
        if step < len(wishes):
            prefill.core.submit(Submit(step, wishes[step].prompt, wishes[step].plan, handoff=Handoff("context_only")))
        elif step % 3 == 0 and step < 200:
            other = Submit(step, random_prompt(30, step), wishes[0].plan, handoff=Handoff("context_only"))
            prefill.core.submit(other)
        prefill.step()
        for index, answer in prefill.answers.items():
            if (told := answer.handoff) is None:
                continue
            answer.handoff = None
            if index >= len(wishes):
                ends[1].release(told.opaque_state)
                continue
            begun = Handoff(
                "generation_only", told.first_gen_tokens, told.first_gen_log_probs, opaque_state=told.opaque_state
            )
            decode.core.submit(Submit(index, wishes[index].prompt, wishes[index].plan, handoff=begun))
        decode.step()
        if len(decode.answers) == len(wishes) and decode.is_idle and step > 200:
            break
    decode.finish()
    deadline = time.monotonic() + 60
    while prefill.core.scheduler.pool.num_held and time.monotonic() < deadline:
        prefill.step()  # the last releases come through a socket
    prefill.finish()
    for end in ends:
        end.close()
    assert decode.paused
    assert_equal(decode.answers, expected, wishes)
