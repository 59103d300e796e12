"""The CUDA path against the CPU's, and CUDA graphs against eager passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runner_player import FAMILIES, Player, build, random_prompt, save

from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.torch_engine.messages import Logprob
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
SHAPES = [*((family, {}) for family in FAMILIES), ("qwen3", {"head_dim": 128, "num_attention_heads": 8})]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: f"{shape[0]}-{len(shape[1])}")
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = request.param
    return save(build(family, **changes), tmp_path_factory.mktemp("checkpoint"))


def runner(model_dir: Path, device: str, **changes: Any) -> TorchRunner:
    values: dict[str, Any] = {"tokens_per_block": 16, "max_tokens": 16384, "max_batch_size": 64} | changes
    return create_runner(RunnerArgs(model_dir=model_dir, device=device, **values))


def tokens(one: TorchRunner, lengths: range, count: int, **more: Any) -> list[list[int]]:
    player = Player(one)
    return player.finish([player.add(random_prompt(length, length), room=count) for length in lengths], count, **more)


@pytest.mark.parametrize("lengths", [range(40, 41), range(1, 150, 13), range(3, 131, 2)], ids=["1", "12", "64"])
def test_float32_tokens_equal_the_cpus_with_and_without_graphs(model_dir: Path, lengths: range) -> None:
    expected = tokens(runner(model_dir, "cpu"), lengths, 20)
    for graphs in (True, False):
        one = runner(model_dir, "cuda", dtype="float32", cuda_graphs=graphs)
        assert tokens(one, lengths, 20) == expected
        assert tokens(one, lengths, 20, chunk=24) == expected
        one.close()


def test_bfloat16_logprobs_are_close_to_float32_on_the_cpu(model_dir: Path) -> None:
    prompt, sampling = random_prompt(200, 0), SamplingParams(prompt_logprobs=0)
    found: list[list[dict[int, Logprob]]] = []
    for one in (runner(model_dir, "cpu"), runner(model_dir, "cuda", dtype="bfloat16")):
        player = Player(one)
        playing = player.add(prompt, sampling=sampling)
        player.step([playing])
        found.append(playing.results[0].prompt_logprobs or [])
    exact, rounded = (
        torch.tensor([entry[token].logprob for entry, token in zip(entries, prompt[1:], strict=True)])
        for entries in found
    )
    assert (exact - rounded).abs().median() < 0.2 and (exact - rounded).abs().mean() < 0.3


@pytest.mark.parametrize("count", [1, 5, 17])  # a row by elements, some by tensor cores, too many for either
@pytest.mark.parametrize("graphs", [True, False])
def test_decodes_by_products_of_few_rows_have_the_logprobs_of_float32_on_the_cpu(
    model_dir: Path, count: int, graphs: bool
) -> None:
    one = runner(model_dir, "cuda", dtype="float16", cuda_graphs=graphs)
    player = Player(one)
    sampling = SamplingParams(logprobs=0)
    playing = [player.add(random_prompt(20 + at, at), sampling=sampling) for at in range(count)]
    outputs = player.finish(playing, 20)
    exact, rounded = runner(model_dir, "cpu"), runner(model_dir, "cpu", dtype="float16")
    for at, output in enumerate(outputs):
        expected = scored(exact, playing[at].prompt, output)
        found = [
            (result.logprobs or {})[token].logprob for result, token in zip(playing[at].results, output, strict=True)
        ]
        # Where two experts are about equally likely, rounding chooses the other one, on a CPU too.
        most = 0.05 + float((scored(rounded, playing[at].prompt, output) - expected).abs().mean())
        assert float((torch.tensor(found) - expected).abs().mean()) < most, at
    one.close()


def scored(one: TorchRunner, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Logprobs of the tokens of ``output`` behind ``prompt``, in one forward."""
    player = Player(one)
    whole = player.add([*prompt, *output], sampling=SamplingParams(prompt_logprobs=0))
    player.step([whole])
    entries = (whole.results[0].prompt_logprobs or [])[-len(output) :]
    return torch.tensor([entry[token].logprob for entry, token in zip(entries, output, strict=True)])


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1},
    {},
    {"temperature": 1.0},
    {"top_p": 0.6},
    {"temperature": 2.0, "top_k": 150, "min_p": 0.05},
    {"frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"temperature": 1.5, "min_tokens": 5},
    {"temperature": 1.0, "top_p": 0.3, "logprobs": 2},
]


def sampled(one: TorchRunner) -> list[list[int]]:
    """Tokens of a mixed batch, its prompts in chunks beside decodes, whose slots other sequences had before."""
    player = Player(one)
    others = [player.add(random_prompt(9, seed), sampling=SamplingParams(**KINDS[-seed]), seed=99) for seed in range(8)]
    player.finish(others, 3)
    player = Player(one, seed=1)
    playing = [
        player.add(
            random_prompt(30 + 7 * at, at), sampling=SamplingParams(**KINDS[at % 8]), seed=at, stop_ids=(1, 2, 3, 5)
        )
        for at in range(17)
    ]
    return player.finish(playing, 12, chunk=40)


def test_seeded_sampling_gives_the_cpus_tokens_with_and_without_graphs(model_dir: Path) -> None:
    expected = sampled(runner(model_dir, "cpu"))
    for graphs in (True, False):
        one = runner(model_dir, "cuda", dtype="float32", cuda_graphs=graphs)
        assert sampled(one) == expected
        one.close()


@pytest.mark.parametrize("graphs", [True, False])
def test_what_sampling_needs_is_compiled_when_the_runner_is_ready(model_dir: Path, graphs: bool) -> None:
    from trtx.torch_engine.runner.sampling import triton_draw, triton_last_tokens, triton_search

    kernels = [
        triton_last_tokens.fill_kernel,
        triton_draw.edit_kernel, triton_draw.summaries_kernel, triton_draw.weights_kernel, triton_draw.choose_kernel,
        triton_draw.check_kernel, triton_draw.retry_kernel, triton_search.search_kernel,
    ]  # fmt: skip

    def variants() -> list[int]:
        return [sum(len(caches[0]) for caches in kernel.device_caches.values()) for kernel in kernels]

    one = runner(model_dir, "cuda", cuda_graphs=graphs, max_batch_size=18)  # no row of its inputs begins at 16 bytes
    compiled = variants()
    assert all(compiled)
    sampled(one)
    assert variants() == compiled
    one.close()


def test_the_pool_takes_its_share_of_free_memory_and_close_gives_it_back(model_dir: Path) -> None:
    before = torch.cuda.mem_get_info()[0]
    one = runner(model_dir, "cuda", max_tokens=None, free_gpu_memory_fraction=0.5, cuda_graphs=False)
    assert 0.3 * before < one.pool.nbytes < 0.5 * before
    assert one.device_memory_bytes() >= one.pool.nbytes
    one.close()
    assert torch.cuda.mem_get_info()[0] > 0.9 * before
