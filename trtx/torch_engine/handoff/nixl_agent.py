"""A NIXL agent with one registered pool. It costs nothing while idle and listens only on loopback by default."""

from __future__ import annotations

import logging
import os
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from trtx.torch_engine.handoff.reads import BlockIds

PROGRESS_WAKEUP_US = 10_000
"""Longest sleep of NIXL's progress thread when UCX signals nothing.

Messages wake it at once; this bounds the rare transport that does not signal. An idle agent costs 0.6 % of a core with
this value, 3 % with 1,000.
"""


class AgentError(Exception):
    """NIXL raised or returned an error. Used inside this folder only: the transport decides what the error means for a
    read.
    """


def _load_nixl() -> Any:
    """Imports NIXL (3 s), with UCX on loopback, and removes NIXL's log handler on stdout."""
    # By default UCX listens on every interface. A topology that spans hosts sets the variable itself.
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    import nixl

    # At import, NIXL 1.5.1 gives its logger a handler on stdout at level INFO.
    nixl_log = logging.getLogger("nixl")
    nixl_log.handlers.clear()
    nixl_log.propagate = True
    nixl_log.setLevel(logging.WARNING)
    return nixl


def _new_agent(nixl: Any, name: str) -> Any:
    """Creates an agent with the UCX backend, without NIXL's listener, and with a progress thread that sleeps."""
    # NIXL 1.5.1's Python config sets the progress thread's delay to 0: the thread then never sleeps and costs a core
    # for the agent's whole life. The binding underneath accepts a delay. Use only nixl_agent_config once it accepts one
    # too.
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
    config = nixl._bindings.nixlAgentConfig()
    config.useProgThread = True
    config.useListenThread = False
    config.pthrDelay = PROGRESS_WAKEUP_US
    agent.agent = nixl._bindings.nixlAgent(name, config)
    try:
        agent.create_backend("UCX")
    except nixl._bindings.nixlBackendError as error:
        raise RuntimeError(
            f"UCX opens no connection with UCX_NET_DEVICES={os.environ.get('UCX_NET_DEVICES', '')} ({error}); expected "
            "a device of this machine that is up and has an address: over hosts, device in the hosts file"
        ) from error
    return agent


class PoolAgent:
    """One incarnation of a NIXL agent, under a unique name. Blocks are addressed by their ids.

    ``close`` destroys the agent and everything in flight: afterwards nothing writes to the pool.
    """

    def __init__(self, pool: torch.Tensor, block_bytes: int) -> None:
        nixl = _load_nixl()
        # NIXL 1.5.1's errors have no common base class.
        self._errors = tuple(
            e for e in vars(nixl._bindings).values() if isinstance(e, type) and issubclass(e, Exception)
        )
        self._block_bytes = block_bytes
        self.name = f"trtx-{uuid.uuid4().hex}"
        self.memory = "VRAM" if pool.is_cuda else "DRAM"
        self.device_id = max(pool.get_device(), 0)
        self._agent = _new_agent(nixl, self.name)
        region = (pool.data_ptr(), pool.shape[0] * block_bytes, self.device_id, "")
        self._registered = self._agent.register_memory([region], self.memory)
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._blocks = self._prepare("", self.memory, pool.data_ptr(), pool.shape[0], self.device_id)

    def connect(
        self, name: str, metadata: bytes, memory: str, base_address: int, num_blocks: int, device_id: int
    ) -> Any:
        """Connects to an agent and prepares the blocks of its pool, once. Returns the argument for ``read``."""
        try:
            if name != self.name:
                self._agent.add_remote_agent(metadata)
            return self._prepare(name, memory, base_address, num_blocks, device_id)
        except self._errors as error:
            raise AgentError(str(error)) from error

    def _prepare(self, name: str, memory: str, base_address: int, num_blocks: int, device_id: int) -> Any:
        """Prepares one descriptor for each block, in NIXL's strided form: address, length, device, stride, count."""
        strided = np.array([[base_address, self._block_bytes, device_id, self._block_bytes, num_blocks]], np.uint64)
        return self._agent.prep_xfer_dlist(name, strided, memory)

    def disconnect(self, name: str, peer_blocks: Any) -> None:
        """Disconnects from an agent after :meth:`forget` of all reads from it. A read in flight may still write until
        ``close``.
        """
        try:
            peer_blocks.release()
            if name != self.name:
                self._agent.remove_remote_agent(name)
        except self._errors as error:
            raise AgentError(str(error)) from error

    def read(self, peer_blocks: Any, remote: BlockIds, local: BlockIds, message: bytes) -> Any:
        """Starts copying blocks into the local pool; the peer gets ``message`` once they have arrived."""
        try:
            transfer = self._agent.make_prepped_xfer("READ", self._blocks, local, peer_blocks, remote, message)
            state = self._agent.transfer(transfer)
        except self._errors as error:
            raise AgentError(str(error)) from error
        if state == "ERR":
            raise AgentError("the transfer could not be posted")
        return transfer

    def is_done(self, transfer: Any) -> bool:
        """Returns whether the read is done, and drives NIXL's progress. Raises AgentError if the read has failed."""
        try:
            state = self._agent.check_xfer_state(transfer)
        except self._errors as error:
            raise AgentError(str(error)) from error
        if state == "ERR":
            raise AgentError("the transfer failed")
        return bool(state == "DONE")

    def forget(self, transfer: Any) -> None:
        """Frees the handle of a read, cancelling the read as far as UCX can."""
        try:
            transfer.release()
        except self._errors as error:
            raise AgentError(str(error)) from error

    def notify(self, name: str, message: bytes) -> None:
        try:
            self._agent.send_notif(name, message)
        except self._errors as error:
            raise AgentError(str(error)) from error

    def notifications(self) -> list[bytes]:
        """Returns the notifications that arrived since the last call."""
        return [message for messages in self._agent.get_new_notifs().values() for message in messages]

    def close(self) -> None:
        """Destroys the agent. Call :meth:`forget` for all reads and :meth:`disconnect` for all peers before."""
        self._blocks.release()
        self._agent.deregister_memory(self._registered)
        # The handle and the wrapper hold the binding's agent, whose destructor ends the progress thread and UCX's
        # worker.
        del self._blocks, self._registered, self._agent
