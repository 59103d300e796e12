"""YaRN on sequences past the original positions: generate()'s tokens, whatever the engine cuts, finds and sends."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_player import Engine
from examples import first_of
from mrope_player import build_vl
from runner_player import build, random_prompt, reference_tokens, save, small_runner
from transformers import PreTrainedModel

from trtx.checkpoint import read_model_config
from trtx.checkpoint.facts import read_checkpoint
from trtx.memory.gpus import MemoryDevice
from trtx.memory.plan import plan_memory
from trtx.torch_engine.llmapi import LLM, SamplingParams
from trtx.torch_engine.llmapi.sampling import resolve_sampling
from trtx.torch_engine.messages import Submit
from trtx.torch_engine.runner import TorchRunner

pytestmark = pytest.mark.slow

ORIGINAL, FACTOR, COUNT = 32, 4.0, 12
LONGEST = int(ORIGINAL * FACTOR)
CARD = {"type": "yarn", "factor": FACTOR, "original_max_position_embeddings": ORIGINAL}
# As the cards of Qwen2.5 and Qwen3 have it: positions as they were, of Qwen3 with some room beyond the original ones.
SHAPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "qwen2.5": ("qwen2", ORIGINAL, {}),
    "qwen3": ("qwen3", ORIGINAL + 8, {"beta_fast": 16, "truncate": False}),
    "mistral": ("mistral", ORIGINAL, {"mscale": 1.3, "mscale_all_dim": 0.8, "beta_slow": 0.5}),
    "llama": ("llama", LONGEST, {"attention_factor": 1.2}),
}


@pytest.fixture(scope="module", params=first_of(2, SHAPES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """transformers' model of the card's config; its file has ``rope_scaling``, as cards of transformers 4 have it."""
    family, positions, fields = SHAPES[request.param]
    rope = CARD | fields | {"rope_type": "yarn", "rope_theta": 50.0}
    windows = {"sliding_window": None} if family == "mistral" else {}
    made = build(family, max_position_embeddings=positions, rope_parameters=dict(rope), **windows)
    directory = save(made, tmp_path_factory.mktemp("yarn"))
    config = json.loads((directory / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 50.0, "rope_scaling": CARD | fields}
    (directory / "config.json").write_text(json.dumps(config))
    return made, directory


new_runner = partial(small_runner, dtype="float32", num_blocks=96)


def prompts() -> list[list[int]]:
    """One within the original positions, several past them; some begin alike."""
    common = random_prompt(70, seed=9)
    return [random_prompt(9, 1), common + random_prompt(12, 2), common + random_prompt(44, 3), random_prompt(116, 4)]


def asked(runner: TorchRunner, *, step_tokens: int, rounds: int = 1) -> list[list[int]]:
    engine = Engine(runner, overlap=True, step_tokens=step_tokens)
    for number in range(rounds):
        for index, prompt in enumerate(prompts()):
            plan = resolve_sampling(SamplingParams(max_tokens=COUNT, ignore_eos=True))
            engine.core.submit(Submit(number * 10 + index, prompt, plan))
        engine.finish()
    return [engine.answers[(rounds - 1) * 10 + index].tokens for index in range(len(prompts()))]


def test_tokens_past_the_original_positions_are_generates(model: tuple[PreTrainedModel, Path]) -> None:
    made, directory = model
    expected = [reference_tokens(made, prompt, COUNT) for prompt in prompts()]
    runner = new_runner(directory)
    assert asked(runner, step_tokens=512) == expected
    assert asked(runner, step_tokens=13) == expected, "prompts in chunks"
    assert asked(runner, step_tokens=24, rounds=2) == expected, "prefixes that were computed before"
    runner.close()


@pytest.mark.proof  # an engine for each model
def test_a_sequence_may_be_as_long_as_the_scaled_positions(model: tuple[PreTrainedModel, Path]) -> None:
    made, directory = model
    assert read_model_config(directory).max_position == LONGEST
    prompt = random_prompt(LONGEST - COUNT, seed=5)
    with LLM(directory, skip_tokenizer_init=True, max_batch_size=2, kv_cache_config={"max_tokens": 512}) as llm:
        assert llm.max_seq_len == LONGEST
        answer = llm.generate(prompt, SamplingParams(max_tokens=4 * COUNT, ignore_eos=True))
        assert not isinstance(answer, list)
        assert answer.outputs[0].token_ids == reference_tokens(made, prompt, COUNT)
        assert answer.outputs[0].finish_reason == "length"


def test_plan_and_load_count_the_scaled_positions(model: tuple[PreTrainedModel, Path]) -> None:
    _, directory = model
    stated = json.loads((directory / "config.json").read_text())["max_position_embeddings"]
    plan = plan_memory(directory, "agg", {}, engine="torch", device=MemoryDevice("cpu", 1 << 34, is_gpu=False))
    assert plan.max_seq_len == LONGEST
    checkpoint = read_checkpoint(directory, "yarn")
    assert checkpoint.context_by("torch") == LONGEST
    assert checkpoint.context_by("tensorrt-llm") == stated, "TensorRT-LLM does not follow YaRN"


@pytest.mark.parametrize(
    ("family", "kind"),
    first_of(2, [("qwen2.5-vl", "yarn"), ("qwen3-vl", "linear"), ("qwen2.5-vl", "linear"), ("qwen3-vl", "yarn")]),
)
def test_text_of_a_model_with_three_positions_is_scaled_too(family: str, kind: str, tmp_path: Path) -> None:
    scaling = CARD | {"type": kind, "rope_type": kind}
    if kind == "linear":
        del scaling["original_max_position_embeddings"]
    made = build_vl(family, **scaling)
    made.save_pretrained(tmp_path)
    runner = new_runner(tmp_path)
    assert asked(runner, step_tokens=24) == [reference_tokens(made, prompt, COUNT) for prompt in prompts()]
    runner.close()
