"""Mixtures of experts on a GPU: kernels against the loop over experts, graphs against eager forwards.

The kernels also run without a GPU, with TRITON_INTERPRET=1 and triton.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import DEVICE, DTYPES, IS_INTERPRETED, TOLERANCE, Pair, config, random
from runner_player import Player, build, random_prompt, save

from trtx.errors import UsageError
from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.torch_engine.runner import RunnerArgs, create_runner
from trtx.torch_engine.runner.linear import LIBRARY_MULTIPLIER
from trtx.torch_engine.runner.mlp import ExpertWeights, LoopedExperts, route

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and DEVICE.type == "cuda", reason="needs CUDA"),
]
HIDDEN, INTERMEDIATE = 96, 40  # neither is a multiple of a tile


def experts_of(dtype: torch.dtype, *, count: int, per_token: int, normalizes: bool) -> ExpertWeights:
    return ExpertWeights(
        random(count, HIDDEN, dtype=dtype) / HIDDEN**0.5,
        random(count, 2 * INTERMEDIATE, HIDDEN, dtype=dtype) / HIDDEN**0.5,
        random(count, HIDDEN, INTERMEDIATE, dtype=dtype) / INTERMEDIATE**0.5,
        per_token, normalizes,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "per_token", "normalizes"), [(8, 3, True), (5, 1, False), (20, 20, True)])
@pytest.mark.parametrize("num_rows", [1, 30] if IS_INTERPRETED else [1, 7, 90])
@pytest.mark.parametrize("grouped_tokens", [1000] if IS_INTERPRETED else [1, 1000])
def test_experts_equal_a_loop_over_them(
    grouped_tokens: int, num_rows: int, count: int, per_token: int, normalizes: bool, dtype: torch.dtype
) -> None:
    from trtx.torch_engine.runner.cuda_experts import CudaExperts

    pair = Pair(config(heads=4, kv_heads=2, head_dim=32), dtype)
    weights = experts_of(dtype, count=count, per_token=per_token, normalizes=normalizes)
    x = random(num_rows, HIDDEN, dtype=dtype)
    found = CudaExperts(LIBRARY_MULTIPLIER, count, DEVICE, grouped_tokens=grouped_tokens)(x, weights, pair.triton)
    expected = LoopedExperts(LIBRARY_MULTIPLIER)(x, weights, pair.reference)
    assert (found - expected).double().norm() / expected.double().norm() < TOLERANCE[dtype]


def test_a_padding_row_of_nan_changes_no_other_row() -> None:
    from trtx.torch_engine.runner.cuda_experts import CudaExperts

    pair = Pair(config(heads=4, kv_heads=2, head_dim=32), torch.float16)
    weights = experts_of(torch.float16, count=6, per_token=2, normalizes=True)
    experts = CudaExperts(LIBRARY_MULTIPLIER, 6, DEVICE)
    x = random(5, HIDDEN, dtype=torch.float16)
    before = experts(x, weights, pair.triton)
    x[4] = float("nan")
    assert torch.equal(experts(x, weights, pair.triton)[:4], before[:4])


def test_of_equal_experts_the_first_ones_win() -> None:
    from trtx.torch_engine.runner.cuda_experts import CudaExperts

    pair = Pair(config(heads=4, kv_heads=2, head_dim=32), torch.float32)
    weights = experts_of(torch.float32, count=6, per_token=2, normalizes=True)
    weights.router.zero_()
    x = random(3, HIDDEN, dtype=torch.float32)
    assert route(LIBRARY_MULTIPLIER(x, weights.router), weights)[0].tolist() == [[0, 1]] * 3
    found = CudaExperts(LIBRARY_MULTIPLIER, 6, DEVICE)(x, weights, pair.triton)
    expected = LoopedExperts(LIBRARY_MULTIPLIER)(x, weights, pair.reference)
    assert (found - expected).norm() / expected.norm() < TOLERANCE[torch.float32]


@needs_cuda
@pytest.mark.parametrize("count", [1, 8, 64])
def test_graphs_of_bfloat16_have_logprobs_close_to_float32_on_the_cpu(count: int, tmp_path: Path) -> None:
    model_dir = save(build("qwen3_moe", head_dim=32), tmp_path)
    values: dict[str, Any] = {"tokens_per_block": 16, "max_tokens": 16384, "max_batch_size": 64}
    with_graphs, without, exact = (
        create_runner(RunnerArgs(model_dir=model_dir, **values | changes))
        for changes in (
            {"device": "cuda", "dtype": "bfloat16"},
            {"device": "cuda", "dtype": "bfloat16", "cuda_graphs": False},
            {"device": "cpu"},
        )
    )
    sampling = SamplingParams(logprobs=0)
    for one in (with_graphs, without):
        player, judge = Player(one), Player(exact)
        playing = [player.add(random_prompt(20 + at, at), sampling=sampling) for at in range(count)]
        player.finish(playing, 12)
        differences = []
        for each in playing:
            whole = judge.add([*each.prompt, *each.output], sampling=SamplingParams(prompt_logprobs=0), room=1)
            whole.slot = 0
            judge.step([whole])
            exactly = whole.results[0].prompt_logprobs or []
            for result, token, entry in zip(
                each.results[-12:], each.output, exactly[len(each.prompt) - 1 :], strict=True
            ):
                assert result.logprobs is not None
                differences.append(abs(result.logprobs[token].logprob - entry[token].logprob))
        assert torch.tensor(differences).mean() < 0.15
        one.close()


@needs_cuda
def test_determinism_is_refused(tmp_path: Path) -> None:
    model_dir = save(build("qwen3_moe"), tmp_path)
    with pytest.raises(UsageError, match="mixture of experts, which the torch engine computes deterministically only"):
        create_runner(RunnerArgs(model_dir=model_dir, device="cuda", deterministic=True))
