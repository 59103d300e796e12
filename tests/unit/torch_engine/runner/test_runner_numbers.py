"""Numbers at their limits, on a real model: what is not a number ends its own request alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runner_player import VOCAB, build, random_prompt, save

from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.core.scheduler_limits import SchedulerLimits
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import RunnerArgs, create_runner
from trtx.torch_engine.runner.sampling import definition, slots
from trtx.torch_engine.runner.sampling.rows import mix

pytestmark = pytest.mark.slow

POISON = 17  # the token whose embedding is NaN
NEIGHBOURS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.3, "seed": 5},
    {"repetition_penalty": 1.5},
    {"top_p": 0.8, "seed": 6, "logprobs": 2},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build("qwen2")
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    return save(model, tmp_path_factory.mktemp("poisoned"))


class Engine:
    """A core over the real runner. 24 blocks of 8 tokens: what one request leaves behind, the next one gets."""

    def __init__(self, checkpoint: Path, *, max_num_tokens: int = 64) -> None:
        runner = create_runner(
            RunnerArgs(model_dir=checkpoint, device="cpu", tokens_per_block=8, num_blocks=24, max_batch_size=8)
        )
        self.pool = runner.pool
        self.core = EngineCore(runner, SchedulerLimits(8, max_num_tokens))
        self.tokens: dict[int, list[int]] = {}
        self.errors: dict[int, str] = {}
        self.failed: set[int] = set()  # whose request was not at fault

    def submit(self, sequence_id: int, prompt: list[int], **params: Any) -> None:
        plan = resolve_sampling(SamplingParams(**{"max_tokens": 6, "seed": sequence_id} | params))
        self.core.submit(Submit(sequence_id, prompt, plan))

    def run(self) -> None:
        for _ in range(200):
            report = self.core.step()
            self.core.check()
            for update in report.updates if report is not None else ():
                self.tokens.setdefault(update.sequence_id, []).extend(update.token_ids)
                if update.error is not None:
                    self.errors[update.sequence_id] = update.error
                if update.is_failure:
                    self.failed.add(update.sequence_id)
            if not self.core.scheduler.running and not self.core.scheduler.waiting:
                return
        raise AssertionError("work left")


def clean_prompt(length: int, seed: int) -> list[int]:
    return [token if token != POISON else POISON + 1 for token in random_prompt(length, seed)]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[int, list[int]]:
    """The neighbours' tokens, each alone in an engine."""
    tokens = {}
    for index, params in enumerate(NEIGHBOURS):
        engine = Engine(checkpoint)
        engine.submit(index, clean_prompt(9 + 7 * index, index), **params)
        engine.run()
        tokens[index] = engine.tokens[index]
    return tokens


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"presence_penalty": 1.0}, {"logprobs": 3}],
    ids=lambda params: "+".join(params) or "greedy",
)
def test_a_request_whose_logits_are_nan_ends_alone_with_an_error_that_says_so(
    checkpoint: Path, expected: dict[int, list[int]], params: dict[str, Any]
) -> None:
    engine = Engine(checkpoint, max_num_tokens=16)
    engine.submit(99, [POISON, *clean_prompt(30, 9)], **params)  # takes the pool's first blocks, in several chunks
    for index, neighbour in enumerate(NEIGHBOURS):
        engine.submit(index, clean_prompt(9 + 7 * index, index), **neighbour)
    engine.submit(98, [*clean_prompt(20, 3), POISON], **params)
    engine.run()
    assert {index: engine.tokens[index] for index in expected} == expected
    assert engine.errors.keys() == engine.failed == {98, 99}
    assert all("logits" in error and "NaN" in error for error in engine.errors.values())
    assert not engine.tokens.get(99) and not engine.tokens.get(98)
    for index, neighbour in enumerate(NEIGHBOURS):  # once more, on blocks that the others left
        engine.submit(10 + index, clean_prompt(9 + 7 * index, index), **neighbour)
    engine.run()
    assert [engine.tokens[10 + index] for index in expected] == list(expected.values())


def test_what_others_left_in_the_pool_reaches_nobody(checkpoint: Path, expected: dict[int, list[int]]) -> None:
    engine = Engine(checkpoint)
    with torch.inference_mode():
        engine.pool.fill_(torch.nan)
    for index, neighbour in enumerate(NEIGHBOURS):
        engine.submit(index, clean_prompt(9 + 7 * index, index), **neighbour)
    engine.run()
    assert engine.tokens == expected


def test_nobody_reuses_kv_of_a_request_without_numbers(checkpoint: Path) -> None:
    engine = Engine(checkpoint, max_num_tokens=8)  # its first block is full, and findable, before it samples
    prompt = [POISON, *clean_prompt(15, 1)]
    for sequence_id in (1, 2):
        engine.submit(sequence_id, prompt)
        engine.run()
    assert engine.errors.keys() == {1, 2}
    assert engine.core.scheduler.pool.counters.reused == 0
    assert engine.core.scheduler.pool.num_cached == 0


def test_prompt_logprobs_that_are_no_numbers_are_an_error(checkpoint: Path) -> None:
    engine = Engine(checkpoint)
    engine.submit(1, [5, POISON, 6, 7], prompt_logprobs=1)
    engine.submit(2, [5, 6, 7], prompt_logprobs=1)
    engine.run()
    assert engine.errors.keys() == {1}
    assert len(engine.tokens[2]) == 6


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-46},
        {"temperature": 5e-324, "top_p": 5e-324, "min_p": 1.0, "top_k": 10**30},
        {"temperature": 1.7e308},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 1.7e308, "presence_penalty": 1e300, "frequency_penalty": -1e300, "temperature": 0.5},
        {"repetition_penalty": 5e-324, "presence_penalty": -1e300, "frequency_penalty": 1e300, "min_p": 5e-324},
        {"min_tokens": 6, "stop_token_ids": list(range(VOCAB - 1)), "temperature": 2.0},
        {"min_tokens": 6, "stop_token_ids": [3, 2**31 - 1]},
        {"top_k": 2, "top_p": 5e-324, "temperature": 1e300},
        {"seed": 2**64 - 1, "temperature": 1.0, "logprobs": 1024, "prompt_logprobs": 1024},
    ],
    ids=lambda params: "+".join(params),
)
def test_values_at_the_limits_are_served_beside_others(
    checkpoint: Path, expected: dict[int, list[int]], params: dict[str, Any]
) -> None:
    engine = Engine(checkpoint)
    for index, neighbour in enumerate(NEIGHBOURS):
        engine.submit(index, clean_prompt(9 + 7 * index, index), **neighbour)
    engine.submit(99, clean_prompt(20, 9), **params)
    engine.run()
    assert engine.errors == {}
    assert {index: engine.tokens[index] for index in expected} == expected
    assert len(engine.tokens[99]) == 6
    assert all(0 <= token < VOCAB for token in engine.tokens[99])


def test_a_temperature_is_greedy_in_the_limit(checkpoint: Path) -> None:
    engine = Engine(checkpoint)
    for sequence_id, temperature in enumerate([0.0, 5e-324, 1e-46, 1e-9]):
        engine.submit(sequence_id, clean_prompt(20, 2), temperature=temperature, seed=sequence_id)
    engine.run()
    assert len(set(map(tuple, engine.tokens.values()))) == 1


def test_stop_ids_that_leave_nothing_to_sample_are_refused_alone(checkpoint: Path) -> None:
    engine = Engine(checkpoint)
    engine.submit(1, [5, 6], min_tokens=2, stop_token_ids=list(range(VOCAB)))
    engine.submit(2, [5, 6], stop_token_ids=list(range(VOCAB)))
    engine.run()
    assert "none could be first" in engine.errors[1]
    assert engine.errors.keys() == {1}
    assert not engine.failed


def test_a_row_that_cannot_be_sampled_ends_alone_and_a_device_error_does_not(
    checkpoint: Path, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the fault is: nobody can think of all of them, so one is planted where rows are sampled together."""
    real = definition.random_bits

    def broken(error: Exception) -> Any:
        def draw(mixed_seed: int, index: int, attempt: int) -> int:
            if mixed_seed == mix(13):
                raise error
            return real(mixed_seed, index, attempt)

        return draw

    engine = Engine(checkpoint)
    monkeypatch.setattr(definition, "random_bits", broken(ZeroDivisionError("planted")))
    for index, neighbour in enumerate(NEIGHBOURS):
        engine.submit(index, clean_prompt(9 + 7 * index, index), **neighbour)
    engine.submit(99, [5, 6], temperature=1.0, seed=13)
    engine.run()
    assert "ZeroDivisionError: planted" in engine.errors[99]
    assert {index: engine.tokens[index] for index in expected} == expected
    engine.submit(100, [5, 6], temperature=1.0, seed=13)
    engine.run()
    assert "ZeroDivisionError: planted" in engine.errors[100]

    monkeypatch.setattr(
        definition, "random_bits", broken(torch.AcceleratorError("CUDA error: an illegal memory access"))
    )
    engine.submit(99, [5, 6], temperature=1.0, seed=13)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.run()


def test_a_request_that_finds_no_memory_for_its_counts_ends_alone(
    checkpoint: Path, expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = slots.new_edits, []

    def edits(vocab_size: int, device: torch.device) -> torch.Tensor:
        made.append(device)
        if len(made) == 2:  # the first ones are the neighbour's
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(vocab_size, device)

    engine = Engine(checkpoint)
    monkeypatch.setattr(slots, "new_edits", edits)
    for index, neighbour in enumerate(NEIGHBOURS):
        engine.submit(index, clean_prompt(9 + 7 * index, index), **neighbour)
    engine.submit(99, [5, 6], presence_penalty=1.0)
    engine.run()
    assert engine.errors.keys() == engine.failed == {99}
    assert "out of memory" in engine.errors[99]
    assert {index: engine.tokens[index] for index in expected} == expected
    engine.submit(100, [5, 6], presence_penalty=1.0)
    engine.run()
    assert len(engine.tokens[100]) == 6
