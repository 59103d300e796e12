"""Two engines on one GPU with one copy of the weights: what they take, what they answer, and what a kill leaves."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_player import Player, random_prompt

from trtx.torch_engine.llm_args import WeightGroup
from trtx.torch_engine.llmapi import LLM, SamplingParams
from trtx.torch_engine.runner import RunnerArgs, TorchRunner, create_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
MODEL = "synthetic:qwen3-0.6b"  # 1.1 GiB in bfloat16
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PROMPTS = [[(at * 37 + number * 101) % 3000 + 5 for at in range(30 + 50 * number)] for number in range(3)]
CONFIG: dict[str, Any] = {
    "max_seq_len": 512, "max_batch_size": 8, "max_num_tokens": 2048,
    "kv_cache_config": {"tokens_per_block": 32, "max_tokens": 8192},
}  # fmt: skip


def answers(llm: LLM) -> list[Any]:
    return [llm.generate(prompt, GREEDY).outputs[0].token_ids for prompt in PROMPTS]


def used() -> int:
    """Bytes of the GPU that all processes use."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def kill(llm: LLM) -> None:
    """Returns once the driver has taken back what the killed engine had alone."""
    os.kill(llm.engine_pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{llm.engine_pid}").exists():
        assert time.monotonic() < deadline, "the killed engine is still there"
        time.sleep(0.01)


def engine(group: Path, name: str, **changes: Any) -> LLM:
    return LLM(MODEL, weight_group={"directory": str(group), "name": name}, **(CONFIG | changes))


def test_the_second_engine_takes_no_weights_and_both_outlive_each_other(tmp_path: Path) -> None:
    torch.zeros(1, device="cuda")  # this process's own context is there before anything is compared
    with LLM(MODEL, **CONFIG) as one:
        expected, before = answers(one), used()
        with LLM(MODEL, **CONFIG) as other:
            own_copy = used() - before
            assert answers(other) == expected
    first = engine(tmp_path, "first")
    assert first.shared_weights is not None and first.shared_weights.mapped_from is None
    size, before = first.shared_weights.num_bytes, used()
    second = engine(tmp_path, "second")
    assert second.shared_weights is not None and second.shared_weights.mapped_from == "first"
    assert used() - before < own_copy - 0.9 * size
    assert answers(first) == answers(second) == expected
    kill(first)
    assert answers(second) == expected, "the weights went with the process that loaded them"
    again = engine(tmp_path, "first")
    assert again.shared_weights is not None and again.shared_weights.mapped_from == "second"
    assert answers(again) == answers(second) == expected
    kill(second)
    assert answers(again) == expected
    before = used()
    kill(again)
    deadline = time.monotonic() + 60
    while used() > before - 0.9 * size:
        assert time.monotonic() < deadline, "the weights outlive all engines"
        time.sleep(0.1)


def test_engines_of_a_group_divide_the_memory_that_the_weights_leave(tmp_path: Path) -> None:
    unbounded = {"kv_cache_config": {"tokens_per_block": 32, "free_gpu_memory_fraction": 0.5}}
    with engine(tmp_path, "first", **unbounded) as first, engine(tmp_path, "second", **unbounded) as second:
        blocks = [llm.get_kv_cache_capacity()["maxNumBlocks"] for llm in (first, second)]
        assert blocks[0] < 1.1 * blocks[1], "the first left less than half"
        assert answers(first) == answers(second)


@pytest.mark.parametrize("deterministic", [False, True])
def test_captured_graphs_read_mapped_weights(checkpoint: Path, tmp_path: Path, deterministic: bool) -> None:
    def runner(name: str | None) -> TorchRunner:
        group = None if name is None else WeightGroup(directory=str(tmp_path), name=name)
        return create_runner(
            RunnerArgs(
                model_dir=checkpoint, tokens_per_block=16, max_tokens=1 << 14, max_batch_size=16, weight_group=group,
                deterministic=deterministic,
            )
        )  # fmt: skip

    def tokens(one: TorchRunner) -> list[list[int]]:
        player = Player(one)
        return player.finish([player.add(random_prompt(length, length), room=12) for length in (5, 40, 130)], 12)

    with closing(runner(None)) as own:
        expected = tokens(own)
    first = runner("first")
    with closing(runner("second")) as second:
        assert second.shared_weights is not None and second.shared_weights.mapped_from == "first"
        assert tokens(first) == tokens(second) == expected
        first.close()
        assert tokens(second) == expected
        assert second.graph_misses == 0
