"""The reader's end: turns a handle into a tensor that the reader owns."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from trtx.ipc.shared_tensor import SharedTensor, SharedTensorError, share, take_over
from trtx.torch_engine.embeddings.arena import Arena
from trtx.torch_engine.embeddings.exports import RELEASED
from trtx.torch_engine.embeddings.handle import EmbeddingGone, EmbeddingHandle, EmbeddingMismatch, NixlEmbeddingOffer

log = logging.getLogger(__name__)

ARENA_BYTES = 256 << 20
"""Twice the size of Qwen2.5-VL 7B's largest embedding.

CPU memory, which is touched only as far as embeddings need it.
"""
_MAX_PEERS = 64
_POLL_S = 0.0005


class EmbeddingReader:
    """Reads embeddings by their handles. Thread-safe.

    ``read`` blocks, so do not call it in an event loop's thread, unless exporters have no arena: it then renames a file
    and reads no data. The first read that needs NIXL starts it.
    """

    def __init__(self, *, arena_bytes: int = ARENA_BYTES, clock: Callable[[], float] = time.time) -> None:
        self._arena_bytes = arena_bytes
        self._clock = clock
        self._lock = threading.Lock()  # serialises NIXL reads: a megabyte takes milliseconds
        self._arena: Arena | None = None
        self._peers: OrderedDict[tuple[str, bytes], Any] = OrderedDict()  # by name and metadata; oldest first

    def read(self, handle: EmbeddingHandle, *, width: int | None = None, dtype: str | None = None) -> SharedTensor:
        """Returns the rows in a file that the caller must remove; the lease has ended.

        Raises EmbeddingMismatch before reading anything if the handle contradicts ``width`` or ``dtype``, as far as
        they are known here; EmbeddingGone if the embedding is not available, or not before the deadline.
        """
        handle.check(width=width, dtype=dtype)
        if self._clock() >= handle.deadline_s:
            raise EmbeddingGone("an embedding's lease ended before it was read; encode the image again")
        problem = "its handle names neither a file nor an agent"
        if handle.path is not None:
            try:
                return take_over(SharedTensor(handle.path, handle.dtype, handle.tensor_size))
            except SharedTensorError as error:
                problem = str(error)
        if handle.nixl is not None:
            with self._lock:
                return self._over_nixl(handle, handle.nixl)
        raise EmbeddingGone(f"an embedding can't be read ({problem}); encode the image again")

    def _over_nixl(self, handle: EmbeddingHandle, offer: NixlEmbeddingOffer) -> SharedTensor:
        if self._arena is None:
            self._arena = Arena(self._arena_bytes)
        blocks = self._arena.blocks.take(len(offer.block_ids))
        if blocks is None:
            raise EmbeddingMismatch(
                f"an embedding has {handle.nbytes} bytes; expected at most {self._arena_bytes}, this reader's arena"
            )
        try:
            self._copy(self._arena, offer, blocks, handle.deadline_s)
            return share(self._arena.rows(blocks, handle.dtype, handle.tensor_size, handle.nbytes))
        except SharedTensorError as error:
            raise EmbeddingGone(str(error)) from error
        finally:
            self._arena.blocks.give_back(blocks)

    def _copy(self, arena: Arena, offer: NixlEmbeddingOffer, blocks: tuple[int, ...], deadline_s: float) -> None:
        """Copies the blocks, or raises EmbeddingGone. In either case, nothing writes into ``blocks`` afterwards."""
        from trtx.torch_engine.handoff.nixl_agent import AgentError

        transfer = None
        try:
            peer = self._peer(arena, offer)
            transfer = arena.read(peer, offer, blocks, RELEASED + str(offer.lease_id).encode())
            while not arena.agent.is_done(transfer):
                if self._clock() >= deadline_s:
                    # UCX can't cancel a read, and a frozen peer that resumes would write.
                    self._start_anew(arena, transfer)
                    raise EmbeddingGone("an embedding's read ran past its deadline; encode the image again")
                time.sleep(_POLL_S)
            arena.agent.forget(transfer)
        except AgentError as error:
            # The failed read may still write.
            self._start_anew(arena, transfer)
            raise EmbeddingGone(f"the encoder that keeps an embedding is gone ({error}); encode it again") from error
        if self._clock() >= deadline_s:
            raise EmbeddingGone("an embedding's read ended past its deadline; encode the image again")

    def _peer(self, arena: Arena, offer: NixlEmbeddingOffer) -> Any:
        """Returns the connected peer of the offer. Raises AgentError."""
        key = (offer.agent_name, offer.agent_metadata)
        if key in self._peers:
            self._peers.move_to_end(key)
            return self._peers[key]
        if len(self._peers) >= _MAX_PEERS:
            (name, _), oldest = self._peers.popitem(last=False)
            arena.agent.disconnect(name, oldest)
        self._peers[key] = peer = arena.connect(offer)
        return peer

    def _start_anew(self, arena: Arena, transfer: Any) -> None:
        """Replaces the NIXL agent. ``transfer``: the read in flight, or None."""
        from trtx.torch_engine.handoff.nixl_agent import AgentError

        log.warning("the NIXL agent that reads embeddings starts anew")
        with suppress(AgentError):
            if transfer is not None:
                arena.agent.forget(transfer)
        for (name, _), peer in self._peers.items():
            with suppress(AgentError):  # it ends with the agent
                arena.agent.disconnect(name, peer)
        self._peers.clear()
        arena.start_anew()

    def close(self) -> None:
        """Releases arena and agent. Idempotent."""
        with self._lock:
            if self._arena is not None:
                self._peers.clear()
                self._arena.close()
                self._arena = None
