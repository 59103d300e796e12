"""FP8 weights with scales of rows or blocks on a GPU: products against dequantized ones, graphs, memory, sleep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_export import export
from runner_player import Player, Playing, build, random_prompt
from test_fp8_cuda import check_graphs, runner

from trtx.checkpoint.formats import BLOCK_SCALES, FP8_BLOCK, NO_PRODUCTS, ROW_SCALES, products_of
from trtx.checkpoint.model_config import read_model_config
from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.torch_engine.messages import MEMORY_TAGS
from trtx.torch_engine.runner import TorchRunner
from trtx.torch_engine.runner.args import products_on
from trtx.torch_engine.runner.formats import RoundFp8Rows
from trtx.torch_engine.runner.fp8 import to_fp8
from trtx.torch_engine.runner.linear import Linear
from trtx.torch_engine.runner.scaled_linear import BlockScaledLinear, RowScaledLinear
from trtx.torch_engine.runner.weight_tensors import named_weights
from trtx.torch_engine.runner.weights import load_weights

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]
KINDS = [ROW_SCALES, BLOCK_SCALES]
ROWS = [1, 8, 17, 64, 256, 2048]
# Rows and columns of Qwen3-8B's weights, and of a share whose number of blocks is no multiple of 4.
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1024, 1152)]
# The error of a product beside the exact one of the same operands: what the tensor cores' sums and the result's
# rounding lose. Rounding the operands to four significant bits loses about 0.036.
BOUND = {ROW_SCALES: 0.02, BLOCK_SCALES: 0.01}
PUBLISHED = [
    ("fp8", "FP8_BLOCK_SCALES"),
    ("compressed-tensors", "FP8_BLOCK_SCALES"),
    ("compressed-tensors", "FP8_PER_CHANNEL_PER_TOKEN"),
    ("compressed-tensors", "FP8"),
]
# Two KV heads of 64 are one block: so each merged weight has whole blocks.
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.06}


def weight_of(kind: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (float8 weight, its scales, the dequantized weight in float32). Scales differ by up to 4 times."""
    exact = torch.randn(rows, columns, device="cuda") * 0.02
    if kind == ROW_SCALES:
        scales = torch.rand(rows, device="cuda") * 3e-4 + 1e-4
        whole = scales[:, None]
    else:
        scales = torch.rand(rows // FP8_BLOCK, columns // FP8_BLOCK, device="cuda") * 3e-4 + 1e-4
        whole = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    weight = to_fp8(exact, whole)
    return weight, scales, weight.float() * whole


def linear_of(kind: str, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: Any) -> Linear:
    if kind == ROW_SCALES:
        return RowScaledLinear(weight=weight, row_scales=scales, bias=bias, dtype=dtype)
    return BlockScaledLinear(weight=weight, block_scales=scales, bias=bias, dtype=dtype)


def input_of(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows and groups of columns of different magnitudes; of several rows, one of zeros."""
    x = torch.randn(rows, columns, device="cuda") * (torch.rand(rows, 1, device="cuda") * 4 + 0.1)
    x *= (torch.rand(columns // FP8_BLOCK, device="cuda") * 4 + 0.1).repeat_interleave(FP8_BLOCK)
    x[1:2] = 0
    return x.to(dtype)


def rounded(kind: str, x: torch.Tensor) -> torch.Tensor:
    """What the format makes of x, in float32."""
    return RoundFp8Rows(None if kind == ROW_SCALES else FP8_BLOCK)(x.float())


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_dequantized_weight(kind: str, rows: int, columns: int, num_rows: int) -> None:
    torch.manual_seed(num_rows)
    weight, scales, dequantized = weight_of(kind, rows, columns)
    x = input_of(num_rows, columns)
    found = linear_of(kind, weight, scales, None, torch.bfloat16)(x)
    assert found.shape == (num_rows, rows) and found.dtype == torch.bfloat16 and found.is_contiguous()
    assert not found[1:2].any(), "zeros times a weight are no zeros"
    error = error_of(found, rounded(kind, x) @ dequantized.T)
    assert error < BOUND[kind], f"{error:.5f} of the same operands' product"
    lost = error_of(found, x.float() @ dequantized.T)
    assert 0.005 < lost < 0.06, f"{lost:.5f} of the product with an input that is not rounded"
    print(f"{kind}, {num_rows} x {columns} x {rows}: error {error:.5f}, with the input's rounding {lost:.5f}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_biases_and_both_dtypes(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, scales, dequantized = weight_of(kind, 768, 512)
    bias = torch.randn(768, device="cuda").to(dtype)
    linear = linear_of(kind, weight, scales, bias, dtype)
    for num_rows in (1, 5, 100):
        x = input_of(num_rows, 512, dtype)
        expected = rounded(kind, x) @ dequantized.T + bias.float()
        error = error_of(linear(x), expected)
        assert error < BOUND[kind], f"{num_rows} rows: {error:.5f}"


@pytest.mark.parametrize("num_rows", [1, 6, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_product_computes_with_new_inputs_what_an_eager_one_does(kind: str, num_rows: int) -> None:
    weight, scales, _ = weight_of(kind, 4096, 4096)
    linear = linear_of(kind, weight, scales, None, torch.bfloat16)
    x = input_of(num_rows, 4096)
    linear(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = linear(x)
    for _ in range(3):
        x.copy_(input_of(num_rows, 4096))
        graph.replay()
        assert error_of(found, linear(x)) < 5e-3


def exported(directory: Path, exporter: str, algorithm: str, family: str = "qwen3", **changes: Any) -> Path:
    shape = SHAPE | ({"moe_intermediate_size": 256} if family == "qwen3_moe" else {}) | changes
    export(build(family, **shape), algorithm, directory, exporter=exporter)
    return directory


def logprobs_from(one: TorchRunner, chunk: int = 10_000) -> torch.Tensor:
    prompt, player = random_prompt(200, 5), Player(one)
    playing = player.add(prompt, sampling=SamplingParams(prompt_logprobs=0))
    player.finish([playing], 1, chunk=chunk)
    entries = [entry for result in playing.results for entry in result.prompt_logprobs or []]
    return torch.tensor([entry[token].logprob for entry, token in zip(entries, prompt[1:], strict=True)])


def logprobs(directory: Path, device: str = "cuda", **changes: Any) -> torch.Tensor:
    one = runner(directory, device, **changes)
    found = logprobs_from(one)
    one.close()
    return found


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize(("exporter", "algorithm"), PUBLISHED)
def test_a_published_checkpoint_computes_on_a_gpu_what_it_does_on_a_cpu(
    tmp_path: Path, exporter: str, algorithm: str, family: str
) -> None:
    """qwen2 has biases, llama a tied head, qwen3_moe experts, of which only those with static scales stay in float8."""
    directory = exported(tmp_path, exporter, algorithm, family)
    exact = logprobs(directory, "cpu", dtype="float32")
    wide = logprobs(directory, dtype="float32", cuda_graphs=False)  # dequantized, on the GPU
    assert (wide - exact).abs().mean() < 0.05
    usual = (logprobs(directory, "cpu", dtype="bfloat16") - exact).abs().mean()
    one = runner(directory, dtype="bfloat16", cuda_graphs=False)
    for chunk in (10_000, 48):
        # bfloat16 moves some activations to the next float8 value: as many with one kind of product as with the other.
        found = (logprobs_from(one, chunk) - exact).abs().mean()
        assert found < 1.5 * usual, f"{found:.4f} in chunks of {chunk}, beside {usual:.4f} of dequantized weights"
    one.close()


@pytest.mark.parametrize(("exporter", "algorithm"), PUBLISHED)
def test_weights_in_float8_take_half_the_memory(tmp_path: Path, exporter: str, algorithm: str) -> None:
    directory = exported(tmp_path, exporter, algorithm)
    config, device = read_model_config(directory), torch.device("cuda", 0)
    taken, counted = [], []
    for products in (products_on(device, "bfloat16"), NO_PRODUCTS):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        weights = load_weights(directory, config, device=device, dtype=torch.bfloat16, scaled_products=products)
        taken.append(torch.cuda.memory_allocated() - before)
        counted.append(sum(tensor.nbytes for tensor in _storages(weights)))
        del weights
    assert products_on(device, "bfloat16") == products_of(torch.cuda.get_device_capability(), "bfloat16")
    assert counted[0] < 0.55 * counted[1], counted
    vocabulary = 2 * config.vocab_size * config.hidden_size * 2
    assert taken[0] - vocabulary < 0.6 * (taken[1] - vocabulary), taken


def _storages(weights: Any) -> list[torch.Tensor]:
    """Tensors of the layers, a weight and its transpose once."""
    found: dict[int, torch.Tensor] = {}
    for name, tensor in named_weights(weights).items():
        if name.startswith("layers."):
            found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    return list(found.values())


@pytest.mark.parametrize("algorithm", ["FP8_BLOCK_SCALES", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_graphs_give_the_eager_tokens(tmp_path: Path, algorithm: str) -> None:
    directory = exported(tmp_path, "compressed-tensors", algorithm)
    check_graphs(directory, dtype="bfloat16")


@pytest.mark.parametrize("keeps_weights", [True, False])
@pytest.mark.parametrize("algorithm", ["FP8_BLOCK_SCALES", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_weights_return_after_sleep_and_give_way_to_others(tmp_path: Path, algorithm: str, keeps_weights: bool) -> None:
    directory, other = (
        exported(tmp_path / name, "compressed-tensors", algorithm, initializer_range=wide)
        for name, wide in (("one", 0.06), ("other", 0.05))
    )
    wanted = logprobs(other, dtype="bfloat16", max_batch_size=4)
    one = runner(directory, dtype="bfloat16", max_batch_size=4, sleeps=True, keeps_weights=keeps_weights)
    first = logprobs_from(one)
    assert (first - wanted).abs().mean() > 0.1, "the checkpoints are alike: nothing is compared"
    one.release(MEMORY_TAGS)
    one.restore(MEMORY_TAGS)
    assert (logprobs_from(one) - first).abs().mean() < 0.01
    one.update_weights(other)
    assert (logprobs_from(one) - wanted).abs().mean() < 0.01
    one.release(MEMORY_TAGS)
    one.update_weights(directory)
    one.restore(MEMORY_TAGS)
    assert (logprobs_from(one) - first).abs().mean() < 0.01
    one.close()


@pytest.mark.parametrize("algorithm", ["FP8_BLOCK_SCALES", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_a_deterministic_runner_gives_a_request_the_same_bits_in_any_batch(tmp_path: Path, algorithm: str) -> None:
    directory = exported(tmp_path, "compressed-tensors", algorithm)
    one = runner(directory, dtype="bfloat16", max_batch_size=8, deterministic=True)
    prompts = [random_prompt(length, length) for length in (3, 40, 90, 130)]
    sampling = SamplingParams(max_tokens=8, logprobs=0)
    player = Player(one)
    together = [player.add(prompt, room=8, sampling=sampling) for prompt in prompts]
    player.finish(together, 8, chunk=50)
    for prompt, playing in zip(prompts, together, strict=True):
        alone = Player(one)
        wanted = alone.add(prompt, room=8, sampling=sampling)
        alone.finish([wanted], 8)
        assert _bits(playing) == _bits(wanted), len(prompt)
    scaled = logprobs_from(one)
    one.close()
    exact, usual = logprobs(directory, "cpu", dtype="float32"), logprobs(directory, "cpu", dtype="bfloat16")
    assert (scaled - exact).abs().mean() < 1.5 * (usual - exact).abs().mean()


def _bits(playing: Playing) -> list[Any]:
    found = []
    for result in playing.results:
        if result.token_id is not None:
            assert result.logprobs is not None
            found.append([(token, one.logprob.hex()) for token, one in result.logprobs.items()])
    return found
