"""KV blocks over NIXL (UCX): CPU and GPU memory, one host or several.

Decode pulls: one READ a request, one descriptor a block, from the prefill engine's pool into its own. The completion
notification carries the lease id, so that a finished read releases the lease with no message of its own.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trtx.torch_engine.handoff import codec
from trtx.torch_engine.handoff.base import (
    FailedRead,
    FinishedRead,
    LayoutMismatch,
    LeaseExpired,
    PeerGone,
    TransportEvents,
)
from trtx.torch_engine.handoff.nixl_agent import create_agent, nixl_errors

if TYPE_CHECKING:
    import torch

    from trtx.torch_engine.batch import KvGeometry

IndexArray = npt.NDArray[np.int32]

log = logging.getLogger(__name__)

_LEASE_PREFIX = b"trtx-lease:"


@dataclass(slots=True, eq=False)
class _Peer:
    """A prefill engine as this agent knows it: one descriptor for each block of its pool, prepared once."""

    agent_name: str
    metadata: bytes
    blocks: Any  # nixl_prepped_dlist_handle
    read_ids: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Read:
    peer: _Peer
    transfer: Any  # nixl_xfer_handle; None when there was nothing to copy
    num_bytes: int
    deadline_s: float
    begun_s: float


class NixlTransport:
    """See :class:`~trtx.torch_engine.handoff.base.KvTransport`.

    Between processes of one host UCX copies CPU memory inside ``begin_read`` (7 GB/s seen), GPU memory in the
    background. A peer whose read fails, or runs past its deadline, is dropped with all its reads: closing the
    connection is what makes sure that nothing of it writes any more. The next ``opaque_state`` connects anew.
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
        self._memory = "VRAM" if pool.is_cuda else "DRAM"
        self._device_id = max(pool.get_device(), 0)
        self._agent_name = f"trtx-{uuid.uuid4().hex}"
        self._agent = create_agent(self._agent_name)
        self._errors = nixl_errors()
        region = (pool.data_ptr(), self._num_blocks * geometry.block_bytes, self._device_id, "")
        self._registered = self._agent.register_memory([region], self._memory)
        self._metadata: bytes = self._agent.get_agent_metadata()
        self._blocks = self._prepare_blocks("", self._memory, pool.data_ptr(), self._num_blocks, self._device_id)
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[int, _Read] = {}
        self._finished: list[FinishedRead] = []
        self._failed: list[FailedRead] = []
        self._next_read_id = 0
        self._closed = False

    @property
    def pending_reads(self) -> int:
        return len(self._reads) + len(self._finished) + len(self._failed)

    def export(self, lease_id: int, block_ids: Sequence[int], num_tokens: int, deadline_s: float) -> bytes:
        return codec.encode(
            codec.ExportedKv(
                transport=self.name,
                agent_name=self._agent_name,
                agent_metadata=self._metadata,
                memory=self._memory,
                device_id=self._device_id,
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
        local, remote = self._indices(exported, pairs)
        peer = self._connect(exported)
        transfer = self._post(peer, exported, local, remote)
        read_id = self._next_read_id
        self._next_read_id += 1
        num_bytes = len(pairs) * self._geometry.block_bytes
        self._reads[read_id] = _Read(peer, transfer, num_bytes, exported.deadline_s, begun_s)
        peer.read_ids.add(read_id)
        return read_id

    def poll(self) -> TransportEvents:
        for read_id, read in list(self._reads.items()):
            if read_id in self._reads:  # else its peer was dropped on the way
                self._settle(read_id, read)
        events = TransportEvents(tuple(self._finished), tuple(self._failed), self._released_leases())
        self._finished, self._failed = [], []
        return events

    def release(self, opaque_state: bytes) -> None:
        try:
            exported = codec.decode(opaque_state)
            if exported.transport == self.name:
                peer = self._connect(exported)
                self._agent.send_notif(peer.agent_name, _lease_message(exported.lease_id))
        except LayoutMismatch as error:
            log.warning("a lease is left to its deadline: %s", error)
        except PeerGone:
            pass
        except self._errors as error:
            self._drop(self._peers[exported.agent_name], f"the prefill engine is gone ({error})")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in list(self._peers.values()):
            self._drop(peer, "the transport was closed")
        self._blocks.release()
        self._agent.deregister_memory(self._registered)

    def _settle(self, read_id: int, read: _Read) -> None:
        """Looks at one read, and moves it to the finished or failed ones when it has ended."""
        state = self._state(read)
        is_late = self._clock() >= read.deadline_s
        if state == "DONE":
            self._forget(read_id, read)
            if is_late:
                # It may have ended in time, but nobody looked: its blocks may have been reused under it.
                self._failed.append(FailedRead(read_id, "was seen to be complete only after its lease's deadline"))
            else:
                seconds = time.perf_counter() - read.begun_s
                self._finished.append(FinishedRead(read_id, read.num_bytes, seconds))
        elif state == "ERR":
            self._drop(read.peer, "the prefill engine is gone")
        elif is_late:
            self._drop(read.peer, "did not complete by its lease's deadline")

    def _state(self, read: _Read) -> str:
        """ "DONE", "PROC" or "ERR"."""
        if read.transfer is None:
            return "DONE"
        try:
            state: str = self._agent.check_xfer_state(read.transfer)
        except self._errors:
            return "ERR"
        return state

    def _released_leases(self) -> tuple[int, ...]:
        released = []
        for sender, messages in self._agent.get_new_notifs().items():
            for message in messages:
                if message.startswith(_LEASE_PREFIX):
                    released.append(int(message.removeprefix(_LEASE_PREFIX)))
                else:
                    log.warning("ignored a notification of %d bytes from agent %s", len(message), sender)
        return tuple(released)

    def _indices(self, exported: codec.ExportedKv, pairs: Sequence[tuple[int, int]]) -> tuple[IndexArray, IndexArray]:
        """Block ids (local, remote), int32, checked against both pools: a wrong one would write over another's KV."""
        positions, local = np.array(pairs, dtype=np.int32).reshape(-1, 2).T
        remote = np.array(exported.block_ids, dtype=np.int32)
        if _any_outside(positions, len(remote)):
            raise ValueError(f"pairs index blocks {positions.min()} to {positions.max()} of {len(remote)} exported ones")
        if _any_outside(local, self._num_blocks):
            raise ValueError(f"pairs name local blocks {local.min()} to {local.max()} of {self._num_blocks}")
        if _any_outside(remote, exported.num_blocks):
            raise LayoutMismatch(
                f"opaque_state of prefill engine {exported.agent_name} names blocks {remote.min()} to {remote.max()} "
                f"of a pool of {exported.num_blocks}; expected ids inside the pool; send it unchanged"
            )
        return np.ascontiguousarray(local), remote[positions]

    def _prepare_blocks(self, agent_name: str, memory: str, address: int, num_blocks: int, device_id: int) -> Any:
        """One descriptor a block of a whole pool, to be indexed by block id."""
        size = self._geometry.block_bytes
        # NIXL's strided form: address, length, device, stride, count.
        strided = np.array([[address, size, device_id, size, num_blocks]], dtype=np.uint64)
        return self._agent.prep_xfer_dlist(agent_name, strided, memory)

    def _connect(self, exported: codec.ExportedKv) -> _Peer:
        """The peer that exported, connected if it is not yet. Raises PeerGone."""
        peer = self._peers.get(exported.agent_name)
        if peer is not None and peer.metadata == exported.agent_metadata:
            return peer
        if peer is not None:
            self._drop(peer, "the prefill engine came back under its old name")
        try:
            if exported.agent_name != self._agent_name:
                self._agent.add_remote_agent(exported.agent_metadata)
            blocks = self._prepare_blocks(
                exported.agent_name, exported.memory, exported.base_address, exported.num_blocks, exported.device_id
            )
        except self._errors as error:
            raise _gone(exported, error) from error
        peer = _Peer(exported.agent_name, exported.agent_metadata, blocks)
        self._peers[peer.agent_name] = peer
        return peer

    def _post(self, peer: _Peer, exported: codec.ExportedKv, local: IndexArray, remote: IndexArray) -> Any:
        """Starts the READ; None when there is nothing to copy and the lease was released instead."""
        message = _lease_message(exported.lease_id)
        try:
            if not len(local):
                self._agent.send_notif(peer.agent_name, message)
                return None
            transfer = self._agent.make_prepped_xfer("READ", self._blocks, local, peer.blocks, remote, message)
            state = self._agent.transfer(transfer)
        except self._errors as error:
            self._drop(peer, f"the prefill engine is gone ({error})")
            raise _gone(exported, error) from error
        if state == "ERR":
            self._drop(peer, "the prefill engine is gone")
            raise _gone(exported, "the transfer could not be posted")
        return transfer

    def _forget(self, read_id: int, read: _Read) -> None:
        """Frees the handle of a read. Cancels it if it is still under way."""
        del self._reads[read_id]
        read.peer.read_ids.discard(read_id)
        if read.transfer is not None:
            try:
                read.transfer.release()
            except self._errors as error:
                log.warning("NIXL did not release read %d: %s", read_id, error)

    def _drop(self, peer: _Peer, reason: str) -> None:
        """Closes the connection to a peer. Its reads that have not ended fail with ``reason``."""
        for read_id in sorted(peer.read_ids):
            read = self._reads[read_id]
            is_done = self._state(read) == "DONE"
            self._forget(read_id, read)
            if is_done and self._clock() < read.deadline_s:
                seconds = time.perf_counter() - read.begun_s
                self._finished.append(FinishedRead(read_id, read.num_bytes, seconds))
            else:
                self._failed.append(FailedRead(read_id, reason))
        del self._peers[peer.agent_name]
        try:
            peer.blocks.release()
            if peer.agent_name != self._agent_name:
                self._agent.remove_remote_agent(peer.agent_name)
        except self._errors as error:
            log.warning("NIXL did not let go of agent %s: %s", peer.agent_name, error)


def _any_outside(ids: IndexArray, count: int) -> bool:
    return bool(len(ids)) and bool(ids.min() < 0 or ids.max() >= count)


def _lease_message(lease_id: int) -> bytes:
    return _LEASE_PREFIX + str(lease_id).encode()


def _gone(exported: codec.ExportedKv, cause: object) -> PeerGone:
    return PeerGone(
        f"prefill engine {exported.agent_name} that holds lease {exported.lease_id} is gone ({cause}); "
        "expected it to answer; compute the prompt locally"
    )
