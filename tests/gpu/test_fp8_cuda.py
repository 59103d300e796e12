"""FP8 exports and a float8 KV cache on a GPU: scaled products against dequantized ones, graphs, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_export import export
from runner_player import FAMILIES, Player, build, random_prompt

from trtx.checkpoint.formats import LOADED
from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_FP8, reason="needs an Ada or Hopper GPU")]
PROMPT = random_prompt(200, 5)
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.06}


def exported(directory: Path, algorithm: str = "FP8", family: str = "qwen3", **options: Any) -> Path:
    """One that scaled products take: a qwen2 has biases, a llama a tied head."""
    export(build(family, **SHAPE), algorithm, directory, **options)
    return directory


def runner(directory: Path, device: str = "cuda", **changes: Any) -> TorchRunner:
    values: dict[str, Any] = {"tokens_per_block": 16, "max_tokens": 16384, "max_batch_size": 128} | changes
    return create_runner(RunnerArgs(model_dir=directory, device=device, **values))


def prompt_logprobs(directory: Path, device: str = "cuda", *, chunk: int = 10_000, **changes: Any) -> torch.Tensor:
    one = runner(directory, device, **changes)
    player = Player(one)
    playing = player.add(PROMPT, sampling=SamplingParams(prompt_logprobs=0))
    player.finish([playing], 1, chunk=chunk)
    one.close()
    entries = [entry for result in playing.results for entry in result.prompt_logprobs or []]
    return torch.tensor([entry[token].logprob for entry, token in zip(entries, PROMPT[1:], strict=True)])


@pytest.mark.parametrize("chunk", [10_000, 48])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])  # no FP8 experts with biases
def test_scaled_products_compute_what_dequantized_ones_do(tmp_path: Path, family: str, chunk: int) -> None:
    directory = exported(tmp_path, family=family)
    exact = prompt_logprobs(directory, "cpu")
    assert (prompt_logprobs(directory, dtype="float32") - exact).abs().mean() < 0.05  # dequantized, on the GPU
    scaled = prompt_logprobs(directory, chunk=chunk, dtype="bfloat16")
    dequantized = prompt_logprobs(directory, "cpu", dtype="bfloat16")
    # bfloat16 moves some activations to the next float8 value: as many with one kind of product as with the other.
    assert (scaled - exact).abs().mean() < 1.5 * (dequantized - exact).abs().mean()


@pytest.mark.parametrize("algorithm", LOADED)
def test_every_format_computes_on_a_gpu_what_it_does_on_a_cpu(tmp_path: Path, algorithm: str) -> None:
    directory = exported(tmp_path, algorithm)
    exact = prompt_logprobs(directory, "cpu")
    assert (prompt_logprobs(directory, dtype="float32") - exact).abs().mean() < 0.02


def check_graphs(directory: Path, **changes: Any) -> None:
    """Compares greedy tokens with and without CUDA graphs. ``changes``: arguments of RunnerArgs."""
    for count in (1, 9, 100):
        found = []
        for graphs in (True, False):
            one = runner(directory, cuda_graphs=graphs, **changes)
            player = Player(one)
            playing = [player.add(random_prompt(5 + index, index), room=12) for index in range(count)]
            found.append(player.finish(playing, 12))
            one.close()
        # Padding changes which kernel computes a product, and with it the last bits.
        same = sum(a == b for a, b in zip(*found, strict=True))
        assert same >= 0.9 * count, f"{same} of {count} sequences"


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
def test_graphs_of_scaled_products_give_the_eager_tokens(tmp_path: Path, kv_dtype: str) -> None:
    directory = exported(tmp_path)
    check_graphs(directory, dtype="bfloat16", kv_dtype=kv_dtype)


def test_a_float8_kv_cache_computes_on_a_gpu_what_it_does_on_a_cpu(tmp_path: Path) -> None:
    directory = exported(tmp_path, "W4A16_AWQ", kv_scales=True)
    exact = prompt_logprobs(directory, "cpu")
    for chunk in (10_000, 24):
        assert (prompt_logprobs(directory, chunk=chunk, dtype="float32") - exact).abs().mean() < 0.02


def test_float8_weights_and_kv_take_a_byte_each(tmp_path: Path) -> None:
    directory = exported(tmp_path, kv_scales=True)
    held = {}
    for name, changes in {"float8": {"dtype": "bfloat16"}, "wide": {"dtype": "float32", "kv_dtype": "float32"}}.items():
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        one = runner(directory, cuda_graphs=False, num_blocks=64, **changes)
        held[name] = torch.cuda.memory_allocated() - before
        assert one.pool.nbytes == 64 * one.geometry.block_bytes
        one.close()
        del one
    assert held["float8"] < 0.35 * held["wide"]
