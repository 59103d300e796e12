"""KV blocks over NIXL (UCX): CPU and GPU memory, one host or several.

Decode pulls: one READ a request, one descriptor a block, from the prefill engine's pool into its own. The completion
notification carries the lease id, so that a finished read releases the lease with no message of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trtx.torch_engine.handoff import codec
from trtx.torch_engine.handoff.base import (
    FailedRead,
    FinishedRead,
    LayoutMismatch,
    LeaseExpired,
    PeerGone,
    TransportEvents,
)
from trtx.torch_engine.handoff.nixl_agent import AgentError, BlockIds, PoolAgent

if TYPE_CHECKING:
    import torch

    from trtx.torch_engine.batch import KvGeometry

log = logging.getLogger(__name__)

_LEASE_PREFIX = b"trtx-lease:"


@dataclass(slots=True, eq=False)
class _Peer:
    """A prefill engine as this agent knows it."""

    agent_name: str
    metadata: bytes
    blocks: Any  # of its whole pool, prepared once; see PoolAgent.connect
    read_ids: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Read:
    peer: _Peer
    transfer: Any  # None when there was nothing to copy
    num_bytes: int
    deadline_s: float
    begun_s: float


class NixlTransport:
    """See :class:`~trtx.torch_engine.handoff.base.KvTransport`.

    Between processes of one host UCX copies CPU memory inside ``begin_read`` (7 GB/s seen), GPU memory in the
    background. A peer with whom something failed is dropped with all its reads; its next ``opaque_state`` connects
    anew. A read past its deadline that does not end by itself costs this engine its agent (0.15 s): UCX cannot cancel
    such a read, and a frozen peer that thaws would write into blocks that hold something else by then.
    """

    name = "nixl"

    def __init__(self, pool: torch.Tensor, geometry: KvGeometry, *, clock: Callable[[], float]) -> None:
        expected = (geometry.num_layers, 2, geometry.tokens_per_block, geometry.num_kv_heads, geometry.head_dim)
        if (
            tuple(pool.shape[1:]) != expected
            or str(pool.dtype) != f"torch.{geometry.dtype}"
            or not pool.is_contiguous()
        ):
            raise ValueError(
                f"pool is {tuple(pool.shape)} of {pool.dtype}, contiguous: {pool.is_contiguous()}; "
                f"expected a contiguous (num_blocks, {', '.join(map(str, expected))}) of torch.{geometry.dtype}"
            )
        self._pool = pool  # registered memory must not be freed
        self._geometry = geometry
        self._clock = clock
        self._num_blocks = pool.shape[0]
        self._agent = PoolAgent(pool, geometry.block_bytes)
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[int, _Read] = {}
        self._finished: list[FinishedRead] = []
        self._failed: list[FailedRead] = []
        self._released: list[int] = []
        self._next_read_id = 0
        self._closed = False

    @property
    def pending_reads(self) -> int:
        return len(self._reads) + len(self._finished) + len(self._failed)

    def export(self, lease_id: int, block_ids: Sequence[int], num_tokens: int, deadline_s: float) -> bytes:
        return codec.encode(
            codec.ExportedKv(
                transport=self.name,
                agent_name=self._agent.name,
                agent_metadata=self._agent.metadata,
                memory=self._agent.memory,
                device_id=self._agent.device_id,
                base_address=self._pool.data_ptr(),
                num_blocks=self._num_blocks,
                geometry=self._geometry,
                lease_id=lease_id,
                block_ids=tuple(block_ids),
                num_tokens=num_tokens,
                deadline_s=deadline_s,
            )
        )

    def begin_read(self, opaque_state: bytes, pairs: Sequence[tuple[int, int]]) -> int:
        begun_s = time.perf_counter()
        exported = codec.decode(opaque_state)
        codec.check(exported, transport=self.name, geometry=self._geometry)
        late_s = self._clock() - exported.deadline_s
        if late_s >= 0:
            raise LeaseExpired(
                f"lease {exported.lease_id} of prefill engine {exported.agent_name} ended {late_s:.1f} s ago; "
                "expected a read within its deadline; compute the prompt locally"
            )
        remote, local = self._block_ids(exported, pairs)
        peer = self._connect(exported)
        transfer = self._post(peer, exported, remote, local)
        read_id = self._next_read_id
        self._next_read_id += 1
        num_bytes = len(local) * self._geometry.block_bytes
        self._reads[read_id] = _Read(peer, transfer, num_bytes, exported.deadline_s, begun_s)
        peer.read_ids.add(read_id)
        return read_id

    def poll(self) -> TransportEvents:
        for read_id, read in list(self._reads.items()):
            if read_id in self._reads:  # else its peer was dropped on the way
                self._settle(read_id, read)
        self._collect_released()
        events = TransportEvents(tuple(self._finished), tuple(self._failed), tuple(self._released))
        self._finished, self._failed, self._released = [], [], []
        return events

    def release(self, opaque_state: bytes) -> None:
        try:
            exported = codec.decode(opaque_state)
            if exported.transport != self.name:
                return
            peer = self._connect(exported)
        except LayoutMismatch as error:
            log.warning("a lease is left to its deadline: %s", error)
            return
        except PeerGone:
            return
        try:
            self._agent.notify(peer.agent_name, _lease_message(exported.lease_id))
        except AgentError as error:
            self._drop(peer, f"the prefill engine is gone ({error})")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in list(self._peers.values()):
            self._drop(peer, "the transport was closed")
        self._agent.close()

    def _settle(self, read_id: int, read: _Read) -> None:
        """Looks at one read, and moves it to the finished or failed ones when it has ended."""
        try:
            is_done = read.transfer is None or self._agent.is_done(read.transfer)
        except AgentError as error:
            self._drop(read.peer, f"the prefill engine is gone ({error})")
            return
        is_late = self._clock() >= read.deadline_s
        if is_done:
            self._end(read_id, read)
            if is_late:
                # It may have ended in time, but nobody looked: its blocks may have been reused under it.
                self._failed.append(FailedRead(read_id, "was seen to be complete only after its lease's deadline"))
            else:
                seconds = time.perf_counter() - read.begun_s
                self._finished.append(FinishedRead(read_id, read.num_bytes, seconds))
        elif is_late:
            self._start_anew(f"prefill engine {read.peer.agent_name} let a read run past its lease's deadline")

    def _collect_released(self) -> None:
        for message in self._agent.notifications():
            if message.startswith(_LEASE_PREFIX):
                self._released.append(int(message.removeprefix(_LEASE_PREFIX)))
            else:
                log.warning("ignored a notification of %d bytes that names no lease", len(message))

    def _block_ids(self, exported: codec.ExportedKv, pairs: Sequence[tuple[int, int]]) -> tuple[BlockIds, BlockIds]:
        """Remote and local ids, checked against both pools: a wrong one would overwrite another sequence's KV."""
        positions, local = np.array(pairs, dtype=np.int32).reshape(-1, 2).T
        remote = np.array(exported.block_ids, dtype=np.int32)
        if _any_outside(positions, len(remote)):
            raise ValueError(
                f"pairs index blocks {positions.min()} to {positions.max()} of {len(remote)} exported ones"
            )
        if _any_outside(local, self._num_blocks):
            raise ValueError(f"pairs name local blocks {local.min()} to {local.max()} of {self._num_blocks}")
        if _any_outside(remote, exported.num_blocks):
            raise LayoutMismatch(
                f"opaque_state of prefill engine {exported.agent_name} names blocks {remote.min()} to {remote.max()} "
                f"of a pool of {exported.num_blocks}; expected ids inside the pool; send it unchanged"
            )
        return remote[positions], np.ascontiguousarray(local)

    def _connect(self, exported: codec.ExportedKv) -> _Peer:
        """The peer that exported, connected if it is not yet. Raises PeerGone."""
        e = exported
        peer = self._peers.get(e.agent_name)
        if peer is not None and peer.metadata == e.agent_metadata:
            return peer
        if peer is not None:
            self._drop(peer, "the prefill engine came back under its old name")
        try:
            blocks = self._agent.connect(
                e.agent_name, e.agent_metadata, e.memory, e.base_address, e.num_blocks, e.device_id
            )
        except AgentError as error:
            raise _gone(exported, error) from error
        peer = _Peer(e.agent_name, e.agent_metadata, blocks)
        self._peers[peer.agent_name] = peer
        return peer

    def _post(self, peer: _Peer, exported: codec.ExportedKv, remote: BlockIds, local: BlockIds) -> Any:
        """Starts the READ; None when there is nothing to copy and the lease was released instead."""
        message = _lease_message(exported.lease_id)
        try:
            if not len(local):
                return self._agent.notify(peer.agent_name, message)
            return self._agent.read(peer.blocks, remote, local, message)
        except AgentError as error:
            self._drop(peer, f"the prefill engine is gone ({error})")
            raise _gone(exported, error) from error

    def _end(self, read_id: int, read: _Read) -> None:
        """Frees the handle of a read, cancelling it as far as that goes."""
        del self._reads[read_id]
        read.peer.read_ids.discard(read_id)
        if read.transfer is not None:
            try:
                self._agent.forget(read.transfer)
            except AgentError as error:
                log.warning("NIXL did not free the handle of read %d: %s", read_id, error)

    def _drop(self, peer: _Peer, reason: str) -> None:
        """Forgets a peer. Its reads that have not been seen to end fail with ``reason``."""
        for read_id in sorted(peer.read_ids):
            self._end(read_id, self._reads[read_id])
            self._failed.append(FailedRead(read_id, reason))
        del self._peers[peer.agent_name]
        try:
            self._agent.disconnect(peer.agent_name, peer.blocks)
        except AgentError as error:
            log.warning("NIXL did not let go of agent %s: %s", peer.agent_name, error)

    def _start_anew(self, reason: str) -> None:
        """Ends everything under way by ending the agent. What this engine exported before can't be read any more."""
        log.warning("NIXL agent %s starts anew: %s", self._agent.name, reason)
        self._collect_released()
        for peer in list(self._peers.values()):
            self._drop(peer, reason)
        self._agent.close()
        self._agent = PoolAgent(self._pool, self._geometry.block_bytes)


def _any_outside(ids: BlockIds, count: int) -> bool:
    return bool(len(ids)) and bool(ids.min() < 0 or ids.max() >= count)


def _lease_message(lease_id: int) -> bytes:
    return _LEASE_PREFIX + str(lease_id).encode()


def _gone(exported: codec.ExportedKv, cause: object) -> PeerGone:
    return PeerGone(
        f"prefill engine {exported.agent_name} that holds lease {exported.lease_id} is gone ({cause}); "
        "expected it to answer; compute the prompt locally"
    )
