"""``python ranks_memory.py STAGE READS_PEERS DIRECTORY [DEVICE]``: the memory of two ranks.

STAGE is ``sleep`` (sleep, wake and new weights) or ``tier`` (KV in host memory). DIRECTORY: for checkpoints. Prints a
line with the time after each stage.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from engine_player import assert_equal, served, workload
from rank_script import end, stage
from replaced_weights import pair_of
from returning import assert_same, conversations, play
from runner_player import build, save
from safetensors.torch import load_file, save_file

from trtx.errors import UsageError
from trtx.torch_engine.messages import MEMORY_TAGS
from trtx.torch_engine.ranks.children import start_ranks
from trtx.torch_engine.ranks.leader import LeadingRunner, create_ranked_runner
from trtx.torch_engine.runner import RunnerArgs, create_runner


def two_ranks(args: RunnerArgs) -> LeadingRunner:
    return create_ranked_runner(args, start_ranks(2, end))


def free_bytes(device: str) -> list[int]:
    """Of both GPUs."""
    return [] if device == "cpu" else [torch.cuda.mem_get_info(index)[0] for index in range(2)]


def sleep(directory: Path, device: str, *, reads_peers: bool) -> None:
    first, second = pair_of("qwen3", directory)
    # Small limits, so that few CUDA graph buckets are captured, and blocks enough to see them go.
    args = RunnerArgs(
        model_dir=first, device=device, dtype="float32", tokens_per_block=8, num_blocks=16_384, max_batch_size=5,
        max_num_tokens=64, reads_peers=reads_peers, sleeps=True,
    )  # fmt: skip
    wishes = workload(0)
    expected = {}
    for model_dir in (first, second):
        one = create_runner(RunnerArgs(
            model_dir=model_dir, device=device, dtype="float32", tokens_per_block=8, num_blocks=64, max_batch_size=5,
            max_num_tokens=64,
        ))  # fmt: skip
        expected[model_dir], _ = served(one, wishes, overlap=True)
        one.close()
    stage("one served")
    two = two_ranks(args)
    address, share = two.pool.data_ptr(), two.pool.numel() * two.pool.element_size()

    def check(model_dir: Path, text: str) -> None:
        assert_equal(served(two, wishes, overlap=True)[0], expected[model_dir], wishes)
        assert two.pool.data_ptr() == address
        stage(text)

    check(first, "two gave the tokens of one")
    for _ in range(3):
        awake = free_bytes(device)
        two.release(MEMORY_TAGS)
        asleep = free_bytes(device)
        assert all(later - before >= share for before, later in zip(awake, asleep, strict=True)), (awake, asleep, share)
        two.restore(MEMORY_TAGS)
        check(first, "the same after a sleep")
    two.update_weights(second)
    check(second, "new weights")
    two.release(MEMORY_TAGS)
    two.update_weights(first)
    two.restore(MEMORY_TAGS)
    check(first, "the old ones again, replaced in a sleep")
    weights = load_file(second / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"][0, -1] = float("nan")  # the last columns are rank 1's
    save_file(weights, second / "model.safetensors")
    try:
        two.update_weights(second)
    except UsageError as error:
        assert str(error).startswith("rank 1: "), error
    else:
        raise AssertionError("weights that are no numbers were taken")
    check(first, "a bad file changed nothing")
    assert device == "cpu" or two.graph_misses is not None
    two.close()


def tier(directory: Path, device: str, *, reads_peers: bool) -> None:
    large, small, requests = 40 * 16 + 40, 5 * 12, 400
    shape = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 512, "head_dim": 64}
    two = two_ranks(
        RunnerArgs(
            model_dir=save(build("qwen3", **shape), directory), device=device, tokens_per_block=8,
            num_blocks=2 * large, max_batch_size=5, deterministic=True, reads_peers=reads_peers,
        )
    )  # fmt: skip
    expected = conversations(3, 40, requests)
    play(two, expected, seed=1, num_blocks=2 * large, on_step=lambda core: None)
    stage("a large pool")
    for overlap in (True, False):
        found = conversations(3, 40, requests)
        copies = two.create_host_copies(large * two.geometry.block_bytes)
        core = play(two, found, seed=2, num_blocks=small, copies=copies, overlap=overlap)
        assert_same(found, expected)
        assert core.tier is not None and core.tier.counters.loaded > requests
        assert core.tier.counters.loaded_seconds > 0
        copies.close()
        stage("the same of a small pool above host memory")
    two.close()


if __name__ == "__main__":
    run = {"sleep": sleep, "tier": tier}[sys.argv[1]]
    run(Path(sys.argv[3]), (sys.argv[4:] or ["auto"])[0], reads_peers=sys.argv[2] == "1")
    stage("two closed")
