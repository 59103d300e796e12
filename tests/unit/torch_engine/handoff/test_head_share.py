"""Which heads ranks copy from ranks: every head once, from a rank that has it, to its place."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from trtx.torch_engine.handoff.head_share import HeadShares
from trtx.torch_engine.handoff.memory import ProcessMemory
from trtx.torch_engine.kv_layout import KvGeometry

CASES = [
    (heads, theirs, ours)
    for heads in (1, 2, 4, 6)
    for theirs in (1, 2, 4, 8)
    for ours in (1, 2, 4, 8)
    if all(heads % ranks == 0 or ranks % heads == 0 for ranks in (theirs, ours))
]


def geometry(heads: int) -> KvGeometry:
    return KvGeometry.uniform(num_layers=2, num_kv_heads=heads, head_dim=4, tokens_per_block=3, dtype="float32")


@pytest.mark.parametrize(("heads", "theirs", "ours"), CASES)
def test_blocks_of_any_ranks_are_copied_into_blocks_of_any_other_ranks(heads: int, theirs: int, ours: int) -> None:
    whole = torch.randn(5, *geometry(heads).block_shape)
    sources, targets = HeadShares(heads, theirs), HeadShares(heads, ours)

    def pool_of(shares: HeadShares, rank: int) -> torch.Tensor:
        held = shares.of(rank)
        return whole[:, held.start : held.stop].contiguous()

    exported = [pool_of(sources, rank) for rank in range(theirs)]
    remote, local = np.array([4, 0, 2], np.int32), np.array([1, 3, 0], np.int32)
    for rank in range(ours):
        expected = pool_of(targets, rank)
        found = torch.zeros_like(expected)
        size = geometry(expected.shape[1]).block_bytes
        memory = ProcessMemory(found, size)
        for source, copy in sources.sources(targets.of(rank)):
            memory.start((os.getpid(), exported[source].data_ptr()), remote, local, copy.spans(size))
        assert torch.equal(found[local.tolist()], expected[remote.tolist()])
        assert not found[[2, 4]].any()


@pytest.mark.parametrize(("heads", "ranks"), [(2, 4), (1, 8), (8, 4), (4, 4)])
def test_every_head_is_held_and_ranks_hold_equally_many(heads: int, ranks: int) -> None:
    held = [HeadShares(heads, ranks).of(rank) for rank in range(ranks)]
    assert {head for own in held for head in own} == set(range(heads))
    assert len({len(own) for own in held}) == 1


def test_equal_ranks_copy_whole_blocks_from_one_rank_each() -> None:
    shares = HeadShares(8, 4)
    for rank in range(4):
        ((source, copy),) = shares.sources(shares.of(rank))
        assert source == rank
        assert copy.is_whole
