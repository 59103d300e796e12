"""The NIXL transport (UCX) for KV blocks: CPU and GPU memory, within one host or between hosts.

The decode engine pulls: one READ for each request, with one descriptor for each block, from the prefill engine's pool
into its own. The completion notification carries the lease id, so that a finished read releases the lease without a
separate message.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trtx.torch_engine.handoff import codec
from trtx.torch_engine.handoff.base import PeerGone
from trtx.torch_engine.handoff.nixl_agent import AgentError, PoolAgent
from trtx.torch_engine.handoff.reads import Read, Reads

if TYPE_CHECKING:
    import torch

    from trtx.torch_engine.kv_layout import KvGeometry

log = logging.getLogger(__name__)

_LEASE_PREFIX = b"trtx-lease:"


@dataclass(slots=True, eq=False)
class _Peer:
    """A prefill engine's NIXL agent."""

    agent_name: str
    metadata: bytes
    blocks: Any  # of its whole pool, prepared once; see PoolAgent.connect
    open_reads: dict[int, _Open] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Open:
    read: Read
    peer: _Peer
    transfer: Any  # None if there was nothing to copy


class NixlRoute:
    """A :class:`~trtx.torch_engine.handoff.reads.Transport` over NIXL. It reaches every exporter whose agent is
    reachable.

    Between processes of one host, UCX copies CPU memory inside ``begin`` (7 GB/s measured) and GPU memory in the
    background. After a failure, the peer and all its reads are dropped; the peer's next offer connects again. If a read
    is still running at its deadline, this engine replaces its agent, which takes 0.15 s: UCX can't cancel the read, and
    a frozen peer that resumes would write into blocks that have been reused by then.
    """

    name = "nixl"

    def __init__(self, pool: torch.Tensor, geometry: KvGeometry, reads: Reads) -> None:
        self._pool = pool  # registered memory must not be freed
        self._block_bytes = geometry.block_bytes
        self._reads = reads
        self._agent = PoolAgent(pool, self._block_bytes)
        self._peers: dict[str, _Peer] = {}
        self._open: dict[int, _Open] = {}

    def offer(self) -> codec.NixlOffer:
        agent = self._agent
        return codec.NixlOffer(
            agent_name=agent.name,
            agent_metadata=agent.metadata,
            memory=agent.memory,
            device_id=agent.device_id,
            base_address=self._pool.data_ptr(),
        )

    def begin(self, read: Read) -> bool:
        offer = read.exported.nixl
        if offer is None or read.exported.part is not None:  # its descriptors are whole blocks
            return False
        peer = self._connect(read.exported, offer)
        opened = _Open(read, peer, self._post(peer, read))
        self._open[read.read_id] = peer.open_reads[read.read_id] = opened
        return True

    def poll(self) -> None:
        for read_id, opened in list(self._open.items()):
            if read_id in self._open:  # else its peer was dropped during this loop
                self._settle(opened)
        self._collect_released()

    def release(self, exported: codec.ExportedKv) -> bool:
        if exported.nixl is None:
            return False
        try:
            peer = self._connect(exported, exported.nixl)
        except PeerGone:
            return False
        try:
            self._agent.notify(peer.agent_name, _lease_message(exported.lease_id))
        except AgentError as error:
            self._drop(peer, f"the prefill engine is gone ({error})")
            return False
        return True

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._drop(peer, "the transport was closed")
        self._agent.close()

    def _settle(self, opened: _Open) -> None:
        """Checks one read, and settles it if it has ended."""
        read = opened.read
        try:
            is_done = opened.transfer is None or self._agent.is_done(opened.transfer)
        except AgentError as error:
            self._drop(opened.peer, f"the prefill engine is gone ({error})")
            return
        if is_done:
            self._forget(opened)
            self._reads.finish(read)
        elif self._reads.is_late(read):
            self._start_anew(f"prefill engine {read.exported.engine} let a read run past its lease's deadline")

    def _collect_released(self) -> None:
        for message in self._agent.notifications():
            if message.startswith(_LEASE_PREFIX):
                self._reads.released(int(message.removeprefix(_LEASE_PREFIX)))
            else:
                log.warning("ignored a notification of %d bytes that names no lease", len(message))

    def _connect(self, exported: codec.ExportedKv, offer: codec.NixlOffer) -> _Peer:
        """Returns the exporting peer, connecting to it if needed. Raises PeerGone."""
        peer = self._peers.get(offer.agent_name)
        if peer is not None and peer.metadata == offer.agent_metadata:
            return peer
        if peer is not None:
            self._drop(peer, "the prefill engine came back under its old name")
        try:
            blocks = self._agent.connect(
                offer.agent_name, offer.agent_metadata, offer.memory, offer.base_address, exported.num_blocks,
                offer.device_id,
            )  # fmt: skip
        except AgentError as error:
            raise PeerGone(
                f"prefill engine {exported.engine} that holds lease {exported.lease_id} can't be reached over NIXL "
                f"({error}); expected a network path that UCX can use; compute the prompt locally"
            ) from error
        peer = _Peer(offer.agent_name, offer.agent_metadata, blocks)
        self._peers[peer.agent_name] = peer
        return peer

    def _post(self, peer: _Peer, read: Read) -> Any:
        """Starts the READ. Returns None if there is nothing to copy; it then releases the lease instead."""
        message = _lease_message(read.exported.lease_id)
        try:
            if not len(read.local):
                return self._agent.notify(peer.agent_name, message)
            return self._agent.read(peer.blocks, read.remote, read.local, message)
        except AgentError as error:
            self._drop(peer, f"the prefill engine is gone ({error})")
            raise _gone(read.exported, error) from error

    def _forget(self, opened: _Open) -> None:
        """Frees the handle of a read, cancelling the read as far as UCX can."""
        read_id = opened.read.read_id
        del self._open[read_id], opened.peer.open_reads[read_id]
        if opened.transfer is not None:
            try:
                self._agent.forget(opened.transfer)
            except AgentError as error:
                log.warning("NIXL did not free the handle of read %d: %s", read_id, error)

    def _drop(self, peer: _Peer, reason: str) -> None:
        """Drops a peer. Reads from it that have not ended fail with ``reason``."""
        for opened in list(peer.open_reads.values()):
            self._forget(opened)
            self._reads.fail(opened.read, reason)
        del self._peers[peer.agent_name]
        try:
            self._agent.disconnect(peer.agent_name, peer.blocks)
        except AgentError as error:
            log.warning("NIXL did not remove agent %s: %s", peer.agent_name, error)

    def _start_anew(self, reason: str) -> None:
        """Ends all reads in flight by replacing the agent.

        Peers can no longer read what this engine exported before.
        """
        log.warning("NIXL agent %s starts anew: %s", self._agent.name, reason)
        self._collect_released()
        for peer in list(self._peers.values()):
            self._drop(peer, reason)
        self._agent.close()
        self._agent = PoolAgent(self._pool, self._block_bytes)


def _lease_message(lease_id: int) -> bytes:
    return _LEASE_PREFIX + str(lease_id).encode()


def _gone(exported: codec.ExportedKv, cause: object) -> PeerGone:
    return PeerGone(
        f"prefill engine {exported.engine} that holds lease {exported.lease_id} is gone ({cause}); "
        "compute the prompt locally"
    )
