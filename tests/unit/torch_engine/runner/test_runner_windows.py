"""Layers with sliding windows: the tokens are transformers', whatever the engine keeps, gives back, finds and sends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_player import Engine
from examples import first_of
from runner_player import Player, build, random_prompt, reference_tokens, save
from transformers import PreTrainedModel

from trtx.torch_engine.handoff import create_transport
from trtx.torch_engine.llmapi.sampling import SamplingParams, resolve_sampling
from trtx.torch_engine.messages import Handoff, Submit
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner

pytestmark = pytest.mark.slow

LENGTHS = (1, 2, 7, 8, 9, 31, 33, 70, 100)
_MIXED = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 13}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int | None, ...]]] = {
    "mistral": ("mistral", {"sliding_window": 9}, (9,)),
    "qwen3, one layer of four sees all": ("qwen3", _MIXED | {"max_window_layers": 1}, (None, 13, 13, 13)),
    "gpt-oss, with sinks": ("gpt_oss", {"num_hidden_layers": 4}, (None, 13)),
    "gemma3, with two rotary bases": ("gemma3", {}, (None, 13, 13)),
    "qwen2 alternating": ("qwen2", _MIXED | {"layer_types": _ALTERNATING}, (None, 13)),
}


@pytest.fixture(scope="module", params=first_of(3, MODELS))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    family, changes, _ = MODELS[request.param]
    built = build(family, **changes)
    built.windows = MODELS[request.param][2]
    return built


@pytest.fixture(scope="module")
def model_dir(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def args(model_dir: Path) -> RunnerArgs:
    return RunnerArgs(model_dir=model_dir, device="cpu", tokens_per_block=4, max_tokens=2048, max_batch_size=16)


def test_greedy_tokens_of_a_mixed_batch_equal_transformers(model: PreTrainedModel, args: RunnerArgs) -> None:
    runner = create_runner(args)
    assert runner.geometry.windows == model.windows
    player = Player(runner)
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    expected = [reference_tokens(model, prompt, 24) for prompt in prompts]
    assert player.finish([player.add(prompt, room=24) for prompt in prompts], 24) == expected
    player = Player(runner)
    assert player.finish([player.add(prompt, room=24) for prompt in prompts], 24, chunk=7) == expected


def test_the_window_is_what_makes_the_tokens(model: PreTrainedModel, args: RunnerArgs) -> None:
    """Else nothing here would show that there is one."""
    runner = create_runner(args)
    runner._decoder._kernels._windows = (None,) * 4  # type: ignore[attr-defined]
    player, prompt = Player(runner), random_prompt(70, 5)
    assert player.finish([player.add(prompt)], 24) != [reference_tokens(model, prompt, 24)]


def asked(prompt: list[int], index: int, count: int, handoff: Handoff | None = None) -> Submit:
    return Submit(index, prompt, resolve_sampling(SamplingParams(max_tokens=count, end_id=-1)), handoff=handoff)


def poison_freed_blocks(engine: Engine, runner: TorchRunner) -> list[int]:
    """Writes NaN over each block when it is freed. Returns a list that collects these blocks."""
    pool, freed = engine.core.scheduler.pool, []
    release = pool.release

    def poison(block_ids: Iterable[int]) -> None:
        blocks = list(block_ids)
        release(blocks)
        for block in blocks:
            if not pool._refs[block] and pool._names[block] is None:
                runner.pool[block] = torch.nan
                freed.append(block)

    pool.release = poison  # type: ignore[method-assign]
    return freed


def serve_shared_prompts(engine: Engine) -> list[list[int]]:
    """Serves prompts that begin with parts of one prompt, 40 tokens each, and returns the prompts."""
    shared = random_prompt(60, 1)
    prompts = [shared[: 11 + 7 * index] + random_prompt(5, index) for index in range(7)]
    with torch.inference_mode():
        for index, prompt in enumerate(prompts):
            engine.core.submit(asked(prompt, index, 40))
            engine.step()
        engine.finish()
    return prompts


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [26, pytest.param(200, marks=pytest.mark.proof)])
def test_an_engine_gives_back_finds_and_preempts_and_has_transformers_tokens(
    model: PreTrainedModel, args: RunnerArgs, blocks: int
) -> None:
    """A freed block holds NaN until another sequence writes into it."""
    runner = create_runner(replace(args, num_blocks=blocks * len(model.windows)))
    engine = Engine(runner, overlap=True)
    poison_freed_blocks(engine, runner)
    prompts = serve_shared_prompts(engine)
    assert engine.core.scheduler.pool.counters.reused
    assert bool(engine.paused) == (blocks == 26 and None in model.windows), "windows alone leave room for all"
    for index, prompt in enumerate(prompts):
        assert engine.answers[index].tokens == reference_tokens(model, prompt, 40)


def test_a_decode_engine_goes_on_from_what_a_prefill_engine_sent(model: PreTrainedModel, args: RunnerArgs) -> None:
    runners = [create_runner(args) for _ in range(2)]
    ends = [create_transport(runner.pool, runner.geometry, routes=["direct"], group="g") for runner in runners]
    prefill, decode = (Engine(runner, overlap=True, transport=end) for runner, end in zip(runners, ends, strict=True))
    try:
        for index, length in enumerate((3, 12, 50, 61)):
            prompt = random_prompt(61, 2)[:length]
            prefill.core.submit(asked(prompt, index, 9, Handoff("context_only")))
            while index not in prefill.answers:
                prefill.step()
            given = prefill.answers[index].handoff
            assert given is not None
            sent = decode.core._handoffs.stats.bytes if decode.core._handoffs else 0
            decode.core.submit(asked(prompt, index, 9, replace_request(given)))
            while not decode.is_idle:
                decode.step()
                prefill.step()
            assert decode.answers[index].tokens == reference_tokens(model, prompt, 9)
            assert not decode.answers[index].recomputed_because
            assert decode.core._handoffs is not None
            blocks = (decode.core._handoffs.stats.bytes - sent) / runners[0].geometry.block_bytes
            most = sum(-(-length // 4) if window is None else window // 4 + 2 for window in model.windows)
            assert 0 < blocks <= most
        while not prefill.is_idle or prefill.core.scheduler.pool.num_held:
            prefill.step()
    finally:
        for end in ends:
            end.close()


def replace_request(handoff: Handoff) -> Handoff:
    return Handoff(
        "generation_only", handoff.first_gen_tokens, None, handoff.ctx_request_id, None, handoff.opaque_state
    )


def test_engines_of_other_windows_exchange_nothing(tmp_path: Path) -> None:
    runners: list[TorchRunner] = []
    for window in (9, 10):
        path = save(build("mistral", sliding_window=window), tmp_path / str(window))
        runners.append(create_runner(RunnerArgs(model_dir=path, device="cpu", tokens_per_block=4, max_tokens=512)))
    ends = [create_transport(runner.pool, runner.geometry, routes=["direct"], group="g") for runner in runners]
    prefill, decode = (Engine(runner, overlap=True, transport=end) for runner, end in zip(runners, ends, strict=True))
    try:
        prefill.core.submit(asked(random_prompt(9, 2), 0, 9, Handoff("context_only")))
        while 0 not in prefill.answers:
            prefill.step()
        given = prefill.answers[0].handoff
        assert given is not None
        decode.core.submit(asked(random_prompt(9, 2), 0, 9, replace_request(given)))
        with pytest.raises(AssertionError, match="to a window of 9, 2 KV heads of 16'] on prefill, .* a window of 10"):
            decode.finish()
    finally:
        for end in ends:
            end.close()
