"""Reads between engines of several ranks, over real transports of pools in this process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import pytest
import torch

from trtx.torch_engine.handoff import KvTransport, LayoutMismatch, TransportEvents, create_transport, direct_offer
from trtx.torch_engine.handoff.codec import DirectOffer
from trtx.torch_engine.handoff.head_share import HeadShares
from trtx.torch_engine.handoff.ranked import KvRanks, PartEnded, PartRead, RankedTransport
from trtx.torch_engine.kv_layout import KvGeometry
from trtx.torch_engine.ranks.part_reads import PartReads

HEADS, BLOCKS = 4, 6
LEASE = 3


def geometry(heads: int, dtype: str = "float32") -> KvGeometry:
    return KvGeometry.uniform(num_layers=2, num_kv_heads=heads, head_dim=4, tokens_per_block=3, dtype=dtype)


@dataclass
class OtherRank:
    """A RankReader whose rank is a thread of this process."""

    transport: KvTransport
    ended: SimpleQueue[PartEnded] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        self._offer = direct_offer(self.transport)
        self._reads = PartReads(self.transport, self.ended.put)

    @property
    def offer(self) -> DirectOffer:
        return self._offer

    def begin_part(self, part: PartRead) -> None:
        self._reads.begin(part)

    def take_parts(self) -> list[PartEnded]:
        try:
            return [self.ended.get_nowait()]
        except Empty:
            return []


class RankedEngine:
    """The pools of an engine's ranks, and the transport of its rank 0."""

    def __init__(self, ranks: int, whole: torch.Tensor | None = None, dtype: str = "float32") -> None:
        shares = HeadShares(HEADS, ranks)
        self.pools = []
        for held in map(shares.of, range(ranks)):
            shape = (BLOCKS, *geometry(len(held)).block_shape)
            empty = torch.zeros(shape, dtype=getattr(torch, dtype))
            self.pools.append(empty if whole is None else whole[:, held.start : held.stop].contiguous())
        layout = geometry(HEADS // ranks, dtype)
        self.own, *others = [create_transport(pool, layout, routes=("direct",)) for pool in self.pools]
        self.others = [OtherRank(other) for other in others]
        self.transport = RankedTransport(self.own, layout, KvRanks(shares, self.others))

    def whole(self) -> torch.Tensor:
        return torch.cat(self.pools, dim=1)

    def events(self) -> TransportEvents:
        deadline = time.monotonic() + 20
        while not (events := self.transport.poll()):
            assert time.monotonic() < deadline, "no event within 20 s"
            time.sleep(0.001)
        return events

    def close(self) -> None:
        self.transport.close()


@pytest.mark.parametrize(("theirs", "ours"), [(2, 1), (1, 2), (2, 2), (4, 2), (2, 4)])
def test_a_read_copies_every_head_and_releases_the_lease_once(theirs: int, ours: int) -> None:
    whole = torch.randn(BLOCKS, *geometry(HEADS).block_shape)
    prefill, decode = RankedEngine(theirs, whole), RankedEngine(ours)
    state = prefill.transport.export(LEASE, [5, 0, 2], 9, time.time() + 60)
    read_id = decode.transport.begin_read(state, range(3), [1, 4, 3])
    assert decode.transport.pending_reads == 1
    (read,) = decode.events().finished
    assert (read.read_id, read.num_bytes) == (read_id, 3 * geometry(HEADS).block_bytes)
    assert decode.transport.pending_reads == 0
    assert torch.equal(decode.whole()[[1, 4, 3]], whole[[5, 0, 2]])
    assert prefill.events().released == (LEASE,)
    for engine in (prefill, decode):
        engine.close()


def test_a_read_fails_if_a_rank_can_not_copy_its_part_and_keeps_the_lease() -> None:
    prefill, decode = RankedEngine(2), RankedEngine(2)
    state = prefill.transport.export(LEASE, [0], 3, time.time() + 60)
    prefill.others[0].transport.close()  # rank 1 of the exporter is gone
    decode.transport.begin_read(state, range(1), [0])
    (failed,) = decode.events().failed
    assert "can't be reached" in failed.reason
    assert not prefill.transport.poll()
    decode.transport.release(state)
    assert prefill.events().released == (LEASE,)


def test_another_layout_is_refused_with_the_models_heads_whatever_the_ranks() -> None:
    prefill, decode = RankedEngine(2), RankedEngine(1, dtype="bfloat16")
    state = prefill.transport.export(LEASE, [0], 3, time.time() + 60)
    with pytest.raises(LayoutMismatch, match="dtype is 'float32' on prefill, 'bfloat16' on decode") as refused:
        decode.transport.begin_read(state, range(1), [0])
    assert "groups" not in str(refused.value)
