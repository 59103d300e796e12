"""A runner's memory goes and comes back at the same addresses, and weights are replaced in place."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_export import export
from replaced_weights import logprobs, mirror, pair_of
from runner_player import build, save
from safetensors.torch import load_file, save_file

from trtx.errors import UsageError
from trtx.torch_engine.messages import MEMORY_TAGS
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner


def runner(directory: Path, **changes: Any) -> TorchRunner:
    values: dict[str, Any] = {"tokens_per_block": 8, "max_tokens": 1024, "max_batch_size": 4, "sleeps": True} | changes
    return create_runner(RunnerArgs(model_dir=directory, device="cpu", **values))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one config with different weights."""
    return pair_of("qwen3", tmp_path_factory.mktemp("checkpoints"))


def addresses(one: TorchRunner) -> set[int]:
    return {one.pool.data_ptr(), one._decoder._weights.embedding.data_ptr(), one._decoder._weights.head.data_ptr()}


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_memory_that_was_released_comes_back_at_its_addresses_with_the_same_weights(
    checkpoints: tuple[Path, Path], keeps_weights: bool
) -> None:
    one = runner(checkpoints[0], keeps_weights=keeps_weights)
    expected, places = logprobs(one), addresses(one)
    assert expected == logprobs(runner(checkpoints[0], sleeps=False))
    for _ in range(2):
        assert one.pool.any()
        one.release(MEMORY_TAGS)
        assert not one.pool.any() and not one._decoder._weights.head.any()
        one.restore(MEMORY_TAGS)
        assert not one.pool.any()
        assert logprobs(one) == expected
    assert addresses(one) == places


def test_each_kind_of_memory_sleeps_alone(checkpoints: tuple[Path, Path]) -> None:
    one = runner(checkpoints[0])
    expected = logprobs(one)
    one.release(["model_weights"])
    assert one.pool.any() and not one._decoder._weights.head.any()
    one.restore(["model_weights"])
    one.release(["kv_cache"])
    assert not one.pool.any() and one._decoder._weights.head.any()
    one.restore(["kv_cache"])
    assert logprobs(one) == expected


@pytest.mark.parametrize("sleeps", [True, False])
@pytest.mark.parametrize(
    "family",
    [
        "qwen2",
        "qwen3",
        "llama",
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3_moe", "gpt_oss", "gemma3")),
    ],
)
def test_new_weights_take_the_place_of_the_old_ones(family: str, sleeps: bool, tmp_path: Path) -> None:
    first, second = pair_of(family, tmp_path)
    one = runner(first, sleeps=sleeps)
    before, places = logprobs(one), addresses(one)
    expected = logprobs(runner(second))
    assert expected != before
    one.update_weights(second)
    assert logprobs(one) == expected
    one.update_weights(first)
    assert logprobs(one) == before
    assert addresses(one) == places


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4", "W8A8_SQ_PER_CHANNEL"])
def test_the_scales_of_a_quantized_checkpoint_are_replaced_too(algorithm: str, tmp_path: Path) -> None:
    export(build("qwen3"), algorithm, tmp_path / "first", kv_scales=True)
    model = build("qwen3")
    mirror(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    export(model, algorithm, tmp_path / "second", kv_scales=True)
    stored = tmp_path / "second" / "model.safetensors"
    doubled = {
        name: 2 * value if name.endswith(("k_scale", "v_scale")) else value for name, value in load_file(stored).items()
    }
    save_file(doubled, stored)
    one = runner(tmp_path / "first", kv_dtype="fp8")
    fresh = runner(tmp_path / "second", kv_dtype="fp8")
    assert one.geometry != fresh.geometry, "the scales of the KV differ"
    one.update_weights(tmp_path / "second")
    assert one.geometry == fresh.geometry
    assert logprobs(one) == logprobs(fresh)


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_weights_that_are_replaced_in_their_sleep_are_the_new_ones_after_it(
    checkpoints: tuple[Path, Path], keeps_weights: bool
) -> None:
    one = runner(checkpoints[0], keeps_weights=keeps_weights)
    one.release(MEMORY_TAGS)
    one.update_weights(checkpoints[1])
    one.restore(MEMORY_TAGS)
    expected = logprobs(runner(checkpoints[1]))
    assert logprobs(one) == expected
    one.release(MEMORY_TAGS)  # the copy in host memory has the new ones too
    one.restore(MEMORY_TAGS)
    assert logprobs(one) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused_and_nothing_is_lost(
    checkpoints: tuple[Path, Path], tmp_path: Path, value: float
) -> None:
    one = runner(checkpoints[0])
    expected = logprobs(one)
    stored = Path(shutil.copytree(checkpoints[1], tmp_path / "bad")) / "model.safetensors"
    weights = load_file(stored)
    weights["model.layers.2.mlp.down_proj.weight"][5, 7] = value
    save_file(weights, stored)
    with pytest.raises(UsageError, match=r"can't be used: \S*layers\S* has values that are infinite or not a number"):
        one.update_weights(stored.parent)
    assert logprobs(one) == expected


def test_weights_of_another_config_are_refused_and_nothing_is_lost(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    one = runner(checkpoints[0])
    expected = logprobs(one)
    other = save(build("qwen3", intermediate_size=128), tmp_path / "wide")
    with pytest.raises(UsageError, match=r"its intermediate_size is 128, and \d+ in the loaded one"):
        one.update_weights(other)
    cut = Path(shutil.copytree(checkpoints[1], tmp_path / "cut"))
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-1000])
    with pytest.raises(UsageError, match="cut"):
        one.update_weights(cut)
    assert logprobs(one) == expected


def test_weights_stay_released_if_their_checkpoint_is_gone_and_come_back_with_it(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(checkpoints[0], tmp_path / "model"))
    one = runner(directory, keeps_weights=False)
    expected = logprobs(one)
    one.release(MEMORY_TAGS)
    directory.rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError):
        one.restore(MEMORY_TAGS)
    assert not one._decoder._weights.head.any()
    (tmp_path / "elsewhere").rename(directory)
    one.restore(MEMORY_TAGS)
    assert logprobs(one) == expected
