"""Leases on embeddings that wait for their readers."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from trtx.ipc.encoder_messages import Clip, Grid
from trtx.ipc.leases import LeaseTable
from trtx.ipc.shared_tensor import SharedTensor, SharedTensorError, is_kept, remove_shared
from trtx.torch_engine.embeddings.arena import BLOCK_BYTES, Arena
from trtx.torch_engine.embeddings.handle import EmbeddingHandle

log = logging.getLogger(__name__)

LEASE_S = 60.0
"""Same as the lease time of KV: see ``kv_transfer_timeout_ms``."""
MAX_BYTES = 1 << 30
RELEASED = b"trtx-embedding:"
_SWEEP_S = 0.25


class NoRoom(Exception):
    """The limit of leased bytes is reached; some leases will end soon."""


@dataclass(frozen=True, slots=True)
class _Kept:
    tensor: SharedTensor
    blocks: tuple[int, ...]  # in the arena


class EmbeddingExports:
    """Keeps each embedding until its reader has it, or until ``lease_s`` after the offer. Thread-safe.

    ``arena_bytes``: CPU memory for NIXL, in addition to the files; 0: all readers share this process's scratch
    directory. If a reader dies, its lease ends at the deadline. If an exporter dies, its embeddings remain as files in
    the scratch directory, which is removed with its topology.
    """

    def __init__(
        self,
        *,
        max_bytes: int = MAX_BYTES,
        lease_s: float = LEASE_S,
        arena_bytes: int = 0,
        clock: Callable[[], float] = time.time,  # Unix seconds: deadlines travel to other hosts
    ) -> None:
        self._max_bytes = max_bytes
        self._lease_s = lease_s
        self._clock = clock
        self._ids = itertools.count(1)
        self._leases = LeaseTable()
        self._kept: dict[int, _Kept] = {}
        self._bytes = 0
        self._num_expired = 0
        self._lock = threading.Lock()
        self._arena = Arena(arena_bytes) if arena_bytes else None
        self._wake = threading.Event()
        self._is_closed = False
        self._sweeper = threading.Thread(target=self._keep_sweeping, name="embedding-leases", daemon=True)
        self._sweeper.start()

    @property
    def leases(self) -> int:
        return len(self._kept)

    @property
    def leased_bytes(self) -> int:
        return self._bytes

    @property
    def expired(self) -> int:
        """Number of leases since the start that expired unread."""
        return self._num_expired

    def offer(self, key: bytes, tensor: SharedTensor, grid: Grid | None, clip: Clip | None = None) -> EmbeddingHandle:
        """Leases an embedding, ``[rows, width]``, to one reader.

        Takes ownership of the tensor, even if it raises NoRoom.
        """
        try:
            with self._lock:
                return self._offer(key, tensor, grid, clip)
        except BaseException:
            remove_shared(tensor)
            raise

    def _offer(self, key: bytes, tensor: SharedTensor, grid: Grid | None, clip: Clip | None) -> EmbeddingHandle:
        if self._is_closed or self._bytes + tensor.nbytes > self._max_bytes:
            self._sweep()
        if self._is_closed or self._bytes + tensor.nbytes > self._max_bytes:
            raise NoRoom(
                f"embeddings that wait for their readers have {self._bytes} of at most {self._max_bytes} bytes, and "
                f"{tensor.nbytes} more do not fit; try again"
            )
        blocks = self._in_arena(tensor)
        lease_id = next(self._ids)
        deadline_s = self._clock() + self._lease_s
        rows, width = tensor.shape
        handle = EmbeddingHandle(
            tensor_size=(rows, width),
            dtype=tensor.dtype,  # type: ignore[arg-type]  # an encoder gives no other
            key=key,
            grid=grid,
            clip=clip,
            deadline_s=deadline_s,
            path=tensor.path,
            nixl=self._arena.offer(blocks, lease_id) if self._arena is not None else None,
        )
        self._kept[lease_id] = _Kept(tensor, blocks)
        self._bytes += tensor.nbytes
        self._leases.grant(lease_id, blocks, deadline_s)
        self._wake.set()
        return handle

    def _in_arena(self, tensor: SharedTensor) -> tuple[int, ...]:
        if self._arena is None:
            return ()
        count = -(-tensor.nbytes // BLOCK_BYTES)
        blocks = self._arena.blocks.take(count)
        if blocks is None:
            self._sweep()
            blocks = self._arena.blocks.take(count)
        if blocks is None:
            raise NoRoom(
                f"an embedding of {tensor.nbytes} bytes does not fit into the NIXL arena, which has "
                f"{self._arena.blocks.num_free * BLOCK_BYTES} bytes free; try again when others have been read"
            )
        try:
            self._arena.write(blocks, tensor)
        except SharedTensorError:
            self._arena.blocks.give_back(blocks)
            raise
        return blocks

    def sweep(self) -> None:
        """Ends leases that were read or have expired. A thread calls it every 0.25 s."""
        with self._lock:
            self._sweep()

    def _sweep(self) -> None:
        for message in self._arena.agent.notifications() if self._arena is not None else ():
            if message.startswith(RELEASED):
                self._end(int(message.removeprefix(RELEASED)))
        for lease_id, kept in list(self._kept.items()):
            if not is_kept(kept.tensor):  # its reader took it
                self._end(lease_id)
        for lease in self._leases.expire(self._clock()):
            self._num_expired += 1
            self._free(lease.lease_id)

    def _end(self, lease_id: int) -> None:
        if self._leases.release(lease_id) is not None:
            self._free(lease_id)

    def _free(self, lease_id: int) -> None:
        kept = self._kept.pop(lease_id)
        self._bytes -= kept.tensor.nbytes
        remove_shared(kept.tensor)
        if self._arena is not None:
            self._arena.blocks.give_back(kept.blocks)

    def _keep_sweeping(self) -> None:
        while not self._is_closed:
            self._wake.wait()
            time.sleep(_SWEEP_S)
            with self._lock:
                if self._is_closed:
                    return
                try:
                    self._sweep()
                except Exception:
                    log.exception("the leases of embeddings could not be checked")
                if not self._kept:
                    self._wake.clear()

    def close(self) -> None:
        """Ends all leases. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for lease_id in list(self._kept):
                self._end(lease_id)
            if self._arena is not None:
                self._arena.close()
        self._wake.set()
