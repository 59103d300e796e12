"""A deterministic runner on a GPU: an answer's bits alone, in batches, graphs, chunks, cached and computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_export import export
from runner_player import Player, Playing, build, random_prompt, save

from trtx.torch_engine.llmapi.sampling import SamplingParams
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
LENGTHS = (1, 7, 40, 63, 64, 65, 90, 130, 400, 511)
COUNT = 20
BLOCKS = 2000
KINDS = [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8"), ("float16", "fp8")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 256, "intermediate_size": 1200, "max_position_embeddings": 1024, "head_dim": 64}
    return save(build("qwen3", **shape), tmp_path_factory.mktemp("checkpoint"))


def runner(directory: Path, **changes: Any) -> TorchRunner:
    values = {"tokens_per_block": 8, "num_blocks": BLOCKS, "max_batch_size": 70, "deterministic": True} | changes
    return create_runner(RunnerArgs(model_dir=directory, device="cuda", **values))


def sampling(at: int) -> SamplingParams:
    return SamplingParams(temperature=0.8 if at % 2 else None, logprobs=2)


def add(player: Player, at: int) -> Playing:
    length = LENGTHS[at % len(LENGTHS)]
    return player.add(random_prompt(length, length), room=COUNT + 2, sampling=sampling(at % len(LENGTHS)), seed=7)


def bits(playing: Playing) -> list[Any]:
    found = []
    for result in playing.results:
        if result.token_id is not None:
            assert result.logprobs is not None
            found.append([(token, one.rank, one.logprob.hex()) for token, one in result.logprobs.items()])
    return [playing.output, found]


def expected(one: TorchRunner) -> list[list[Any]]:
    """Of each length, alone, its prompt in one piece."""
    found = []
    for at in range(len(LENGTHS)):
        player = Player(one)
        playing = add(player, at)
        player.finish([playing], COUNT)
        found.append(bits(playing))
    return found


def check(one: TorchRunner, wanted: list[list[Any]]) -> None:
    for batch in (2, 10, 33, 64, 70):
        player = Player(one)
        playing = [add(player, at) for at in range(batch)]
        player.finish(playing, COUNT, chunk=100)
        for at, each in enumerate(playing):
            assert bits(each) == wanted[at % len(LENGTHS)], (batch, at)
    for at in range(len(LENGTHS)):
        player = Player(one)
        first = add(player, at)
        player.finish([first], COUNT, chunk=23)
        assert bits(first) == wanted[at], "in chunks"
        cached, again = add(player, at), add(player, at)
        blocks = (LENGTHS[at] - 1) // 8
        cached.block_ids[:blocks], cached.computed = first.block_ids[:blocks], blocks * 8
        again.output, again.results = first.output[:9], [r for r in first.results if r.token_id is not None][:9]
        player.finish([cached, again], COUNT)
        assert bits(cached) == wanted[at], "from the cache"
        assert bits(again) == wanted[at], "computed again"


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_request_alone_to_the_bit(directory: Path, kind: tuple[str, str]) -> None:
    dtype, kv_dtype = kind
    if kv_dtype == "fp8" and not HAS_FP8:
        pytest.skip("needs an Ada or Hopper GPU")
    one = runner(directory, dtype=dtype, kv_dtype=kv_dtype)
    wanted = expected(one)
    check(one, wanted)
    one.close()
    without_graphs = runner(directory, dtype=dtype, kv_dtype=kv_dtype, cuda_graphs=False)
    check(without_graphs, wanted)
    without_graphs.close()


@pytest.mark.skipif(not HAS_FP8, reason="needs an Ada or Hopper GPU")
def test_so_are_those_of_float8_weights(tmp_path: Path) -> None:
    export(build("qwen3", hidden_size=256, intermediate_size=1200, head_dim=64), "FP8", tmp_path, kv_scales=True)
    one = runner(tmp_path, dtype="bfloat16", max_seq_len=512)
    lengths = [at for at in range(len(LENGTHS)) if LENGTHS[at] + COUNT < 512]
    player = Player(one)
    batch = [add(player, at) for at in lengths]
    player.finish(batch, COUNT, chunk=50)
    for at, playing in zip(lengths, batch, strict=True):
        alone = Player(one)
        wanted = add(alone, at)
        alone.finish([wanted], COUNT)
        assert bits(playing) == bits(wanted), at
    one.close()


def test_all_tilings_are_used_on_this_gpu(directory: Path) -> None:
    """Not a promise: without those for many rows, prompts would be slow, and this says so."""
    from trtx.torch_engine.runner.triton_multiplier import gpu_tilings, triton_multiplier

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for outputs in (1024, 24576):  # several parts, and one
            weight = torch.randn(outputs, 4096, device="cuda").to(dtype)
            multiplier = triton_multiplier()
            multiplier.admit(weight)
            expected = [one for one in gpu_tilings() if one.takes(weight)]
            assert list(multiplier.tilings(weight)) == expected, (dtype, outputs)
