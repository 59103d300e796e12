"""Embeddings that stay on the encoder's device until an engine on the same host copies them.

They are passed on as a shared tensor whose file holds no data, only the data's place on the device. The data is kept as
long as the file has links: leases and caches, and the cleanup after a dead reader, work as for any other file in the
scratch directory. When only the encoder's own link is left, the encoder frees the blocks. After a copy, the reader
checks that the file still exists and that the encoder is alive. Otherwise the blocks may have been reused, and the copy
is invalid.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from trtx.ipc.shared_tensor import SharedTensor, SharedTensorError, remove_shared, share_place
from trtx.torch_engine.embeddings.arena import BLOCK_BYTES, Blocks
from trtx.torch_engine.embeddings.handle import EmbeddingGone, EmbeddingMismatch, EmbeddingUnreachable
from trtx.torch_engine.embeddings.peer_memory import PeerMemory, peer_memory
from trtx.torch_engine.handoff.codec import DirectOffer
from trtx.torch_engine.handoff.memory import CopyFailed, MemoryUnreachable
from trtx.torch_engine.handoff.neighbours import Neighbours, boot_id

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
LAYOUT = f"rows in blocks of {BLOCK_BYTES}".encode()
_HELD = ".held"
_PREFIX = "trtx-rows-"
_WORD = torch.int64  # blocks are written in elements of this size


class DevicePlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of an embedding's rows, stored in the file that keeps them."""

    version: int = FORMAT_VERSION
    offer: DirectOffer
    num_blocks: int  # of the whole arena
    block_bytes: int = BLOCK_BYTES
    block_ids: tuple[int, ...]  # of the embedding, in order; the last may be partly used


class DeviceArena:
    """A bounded region of device memory in which an encoder keeps embeddings for readers. Not thread-safe.

    The constructor raises MemoryUnreachable if no other process can open the memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.blocks = Blocks(max(1, num_bytes // BLOCK_BYTES))
        words = BLOCK_BYTES // _WORD.itemsize
        self._pool = torch.empty(self.blocks.count, words, dtype=_WORD, device=device)
        self._held: dict[Path, tuple[int, ...]] = {}  # keyed by the encoder's own link of the file
        memory = peer_memory(device, self._pool)
        self._neighbours = Neighbours(memory, LAYOUT, None, lambda _: None, what="embeddings", prefix=_PREFIX)

    def __len__(self) -> int:
        """Number of embeddings that may still have a reader."""
        self._collect()
        return len(self._held)

    @torch.inference_mode()
    def keep(self, rows: torch.Tensor) -> SharedTensor | None:
        """Copies ``rows``, ``[rows, width]`` on this arena's device, into the arena; returns None if there is no room.

        The copy stays until no reader or cache has a link to its file. Raises SharedTensorError if the file can't be
        written.
        """
        self._collect()
        data = rows.contiguous().flatten().view(torch.uint8)
        blocks = self.blocks.take(-(-len(data) // BLOCK_BYTES))
        if blocks is None:
            return None
        blocks = tuple(sorted(blocks))  # adjacent blocks are copied together
        try:
            padded = torch.nn.functional.pad(data, (0, len(blocks) * BLOCK_BYTES - len(data)))
            self._pool[torch.tensor(blocks, device=self._pool.device)] = padded.view(_WORD).view(len(blocks), -1)
            if self._pool.is_cuda:
                torch.cuda.current_stream(self._pool.device).synchronize()  # complete before a reader learns of it
            place = DevicePlace(offer=self._neighbours.offer, num_blocks=self.blocks.count, block_ids=blocks)
            shape = tuple(int(size) for size in rows.shape)
            shared = share_place(str(rows.dtype).removeprefix("torch."), shape, msgspec.msgpack.encode(place))
            held = Path(shared.path).with_suffix(_HELD)
            try:
                os.link(shared.path, held)
            except OSError as error:
                remove_shared(shared)
                raise SharedTensorError(f"{shared.path} can't have a second name ({error.strerror})") from error
        except BaseException:
            self.blocks.give_back(blocks)
            raise
        self._held[held] = blocks
        return shared

    def _collect(self) -> None:
        """Frees blocks whose files have no link except the encoder's own."""
        for held, blocks in list(self._held.items()):
            if _names(held) <= 1:
                del self._held[held]
                self.blocks.give_back(blocks)
                held.unlink(missing_ok=True)

    def close(self) -> None:
        """Drops all embeddings; their readers get EmbeddingGone."""
        for held in self._held:
            held.unlink(missing_ok=True)
        self._held.clear()
        self._neighbours.close()


class DeviceReader:
    """Copies embeddings from the arenas of this host's encoders to the engine's device. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: PeerMemory | None = None
        self._neighbours: Neighbours | None = None
        try:
            self._memory = peer_memory(device)
            self._neighbours = Neighbours(
                self._memory, b"", None, lambda _: None, what="embeddings", prefix=_PREFIX, is_read=False
            )
            self._problem = ""
        except (MemoryUnreachable, OSError) as error:
            self._problem = str(error)

    def read(self, shared: SharedTensor, place: bytes) -> torch.Tensor:
        """Returns the embedding's rows on this device. ``place``: content of its file.

        Raises EmbeddingMismatch for an invalid place or one of another version; EmbeddingUnreachable if this process
        can't open the memory; EmbeddingGone if the encoder is gone, or if the embedding was dropped before the copy
        ended.
        """
        found = _parse(shared, place)
        if self._memory is None or self._neighbours is None:
            raise EmbeddingUnreachable(f"this process can't open another process's memory: {self._problem}")
        offer = found.offer
        if (offer.host, offer.memory) != (boot_id(), self._memory.kind):
            raise EmbeddingUnreachable(
                f"the rows lie in memory of kind {offer.memory}; expected {self._memory.kind}, on this host"
            )
        self._memory.adopt_thread()
        encoder = self._neighbours.find(offer)
        if encoder is None:
            if not _listens(offer.address):
                raise EmbeddingGone("the encoder that keeps an embedding is gone; encode the image again")
            raise EmbeddingUnreachable("the memory of the encoder that keeps an embedding can't be opened from here")
        try:
            target = torch.empty(len(found.block_ids) * BLOCK_BYTES, dtype=torch.uint8, device=self._device)
            if encoder.is_gone:
                raise EmbeddingGone("the encoder that keeps an embedding is gone; encode the image again")
            try:
                self._memory.copy(encoder.pool, found.block_ids, target)
            except CopyFailed as error:
                raise EmbeddingGone(
                    f"the encoder that keeps an embedding is gone ({error}); encode it again"
                ) from error
            if not self._neighbours.is_alive(encoder):
                raise EmbeddingGone("the encoder died while its embedding was read; encode the image again")
        finally:
            self._neighbours.leave(encoder)
        if _names(Path(shared.path)) <= 1:
            raise EmbeddingGone("an embedding's lease ended while it was read; encode the image again")
        return target[: shared.nbytes].view(getattr(torch, shared.dtype)).view(shared.shape)

    def close(self) -> None:
        """Closes all arenas."""
        if self._neighbours is not None:
            self._neighbours.close()


def _parse(shared: SharedTensor, place: bytes) -> DevicePlace:
    try:
        version = _VERSION.decode(place).version
        if version != FORMAT_VERSION:
            raise EmbeddingMismatch(
                f"an embedding's place has format version {version}, this process reads {FORMAT_VERSION}; run the same "
                "trtx version on both"
            )
        found = _PLACE.decode(place)
    except msgspec.MsgspecError as error:
        raise EmbeddingMismatch(f"an embedding's place can't be read ({error}); send it unchanged") from error
    if (
        found.block_bytes != BLOCK_BYTES
        or len(found.block_ids) != -(-shared.nbytes // BLOCK_BYTES)
        or not all(0 <= block < found.num_blocks for block in found.block_ids)
    ):
        raise EmbeddingMismatch(
            f"an embedding's place names {len(found.block_ids)} of {found.num_blocks} blocks of {found.block_bytes} "
            f"bytes; expected blocks of {BLOCK_BYTES} bytes for {shared.nbytes} bytes; send it unchanged"
        )
    return found


def _names(path: Path) -> int:
    """Number of hard links of a file; 0 if it is gone."""
    with suppress(OSError):
        return path.stat().st_nlink
    return 0


def _listens(address: str) -> bool:
    with suppress(OSError):
        return f"@{address}\n" in Path("/proc/net/unix").read_text()
    return False


class _Version(msgspec.Struct):
    version: int


# The first use of these types happens here, in the importing thread: see llm_args.
_VERSION = msgspec.msgpack.Decoder(_Version)
_PLACE = msgspec.msgpack.Decoder(DevicePlace)
