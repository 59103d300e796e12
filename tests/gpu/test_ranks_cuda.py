"""Ranks on two GPUs: the same tokens as one GPU, with CUDA graphs, through shared memory and through NCCL."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from engine_player import assert_equal, served, workload

from trtx.checkpoint import resolve_checkpoint
from trtx.torch_engine.ranks.children import start_ranks
from trtx.torch_engine.ranks.leader import create_ranked_runner
from trtx.torch_engine.runner import RunnerArgs, create_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def _end(error: Exception) -> None:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)  # a collective would wait for the other rank forever


@pytest.mark.parametrize("reads_peers", [True, False])
@pytest.mark.parametrize("model", ["synthetic:tiny", "synthetic:tiny-moe"])
def test_two_gpus_give_the_tokens_of_one(model: str, reads_peers: bool) -> None:
    checkpoint = resolve_checkpoint(model).path
    args = RunnerArgs(
        model_dir=checkpoint, dtype="float32", tokens_per_block=8, num_blocks=11, max_batch_size=5,
        reads_peers=reads_peers,
    )  # fmt: skip
    workloads = [workload(seed) for seed in range(3)]
    one = create_runner(args)
    expected = [served(one, wishes, overlap=True)[0] for wishes in workloads]
    one.close()
    two = create_ranked_runner(args, start_ranks(2, _end))
    try:
        for wishes, answers in zip(workloads, expected, strict=True):
            assert_equal(served(two, wishes, overlap=True)[0], answers, wishes)
        assert two.graph_misses is not None
    finally:
        two.close()
