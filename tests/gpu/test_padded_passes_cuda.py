"""CUDA graphs of passes with prompt chunks: the tokens of passes without, and nothing waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_player import assert_equal, served, workload
from runner_player import FAMILIES, Player, build, random_prompt, save

from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner
from trtx.torch_engine.step import FROM_SLOT, Batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
SIZES = (3, 16, 40)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("qwen3"), tmp_path_factory.mktemp("checkpoint"))


def new_runner(model_dir: Path, **changes: Any) -> TorchRunner:
    values: dict[str, Any] = {
        "device": "cuda", "dtype": "float32", "tokens_per_block": 8, "num_blocks": 64, "max_batch_size": 5,
        "merges_passes": True, "pass_sizes": SIZES,
    } | changes  # fmt: skip
    return create_runner(RunnerArgs(model_dir=model_dir, **values))


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_an_engines_tokens_in_float32_are_the_cpus(checkpoint: Path, graphs: bool, merges: bool) -> None:
    on_cpu = new_runner(checkpoint, device="cpu", merges_passes=False, pass_sizes=())
    one = new_runner(checkpoint, cuda_graphs=graphs, merges_passes=merges)
    for seed in range(4):
        wishes = workload(seed)
        expected, _ = served(on_cpu, wishes, overlap=False)
        for overlap in (False, True):
            assert_equal(served(one, wishes, overlap=overlap)[0], expected, wishes)
    one.close()


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_gives_the_bits_of_the_same_padded_pass_without(family: str, kv_dtype: str, tmp_path: Path) -> None:
    model_dir, found = save(build(family, num_attention_heads=8, head_dim=32), tmp_path), []
    for graphs in (True, False):
        one = new_runner(model_dir, dtype="bfloat16", kv_dtype=kv_dtype, cuda_graphs=graphs)
        player, wish = Player(one), SamplingParams(logprobs=4)
        playing = [player.add(random_prompt(length, length), sampling=wish) for length in (5, 3, 6)]
        long = player.add(random_prompt(150, 1))
        while long.computed < len(long.prompt):  # no step of decodes alone, which graphs pad and passes without do not
            player.step([*playing, long], chunk=13)
        found.append([(result.token_id, result.logprobs) for each in playing for result in each.results])
        one.close()
    assert found[0] == found[1]


def test_nothing_that_is_launched_waits_for_the_device(checkpoint: Path) -> None:
    one = new_runner(checkpoint, pass_sizes=(64,))
    player = Player(one)
    decoding = [player.add(random_prompt(9, at), sampling=SamplingParams(temperature=1.0)) for at in range(3)]
    player.finish(decoding, 2)
    arriving = [
        player.add(random_prompt(20, 7), sampling=SamplingParams(prompt_logprobs=1, repetition_penalty=1.2)),
        player.add(random_prompt(17, 8), sampling=SamplingParams(temperature=0.3)),
    ]
    shares = [sequence.share(64) for sequence in (*decoding, *arriving)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        first = one.launch(Batch(shares))
        later = [sequence.share(1) for sequence in decoding]
        for share in later:
            share.new_token_ids, share.start = [FROM_SLOT], share.start + 1
        second = one.launch(Batch(later))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    results = first.results(), second.results()
    assert all(sampled.error is None for part in results for sampled in part)
    one.close()
