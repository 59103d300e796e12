"""What is said of an embedding that waits for its reader."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Literal

import msgspec

from trtx.ipc.encoder_messages import Clip, Grid
from trtx.ipc.shared_tensor import DTYPE_BYTES

FORMAT_VERSION = 1


class EmbeddingGone(Exception):
    """It expired, was taken by another reader, or whoever kept it is gone: encode the picture again."""


class EmbeddingUnreachable(Exception):
    """It stayed on an encoder's device, whose memory can't be opened from here, now or later: ask for it in a file."""


class EmbeddingMismatch(Exception):
    """It is none of this model's, or the handle is none: encoding it there again would give the same."""


class NixlOffer(msgspec.Struct, frozen=True, kw_only=True):
    """How NIXL reaches the blocks of an embedding, from anywhere. They are in CPU memory."""

    agent_name: str  # unique to one life of one agent
    agent_metadata: bytes  # how to connect to it; NIXL's own form
    base_address: int  # of block 0
    num_blocks: int  # of the whole arena
    block_bytes: int
    block_ids: tuple[int, ...]  # of the embedding, in order; the last may be part full
    lease_id: int


class EmbeddingHandle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One embedding, for one reader. ``tensor_size`` is ``[rows, width]``, as TensorRT-LLM's handles call it."""

    version: int = FORMAT_VERSION
    tensor_size: tuple[int, int]
    dtype: Literal["bfloat16", "float16", "float32"]
    key: bytes
    grid: Grid | None = None  # of the rows, in merged patches
    clip: Clip | None = None  # of a video
    deadline_s: float  # Unix seconds
    path: str | None = None  # of the shared tensor, where the reader has the same scratch directory
    nixl: NixlOffer | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.tensor_size) * DTYPE_BYTES[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: bytes are base64."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def check(self, *, width: int | None = None, dtype: str | None = None) -> None:
        """Raises EmbeddingMismatch unless rows of ``width`` columns in ``dtype`` can be what it leads to. None: not
        known here, and looked at by whoever computes with them."""
        rows, columns = self.tensor_size
        if columns != (width or columns) or self.dtype != (dtype or self.dtype):
            raise EmbeddingMismatch(
                f"an embedding has {columns} columns of {self.dtype}; expected {width or columns} of "
                f"{dtype or self.dtype}: give encoder and decoder the same model and dtype"
            )
        if rows < 1 or columns < 1 or (self.grid is not None and (min(self.grid) < 1 or prod(self.grid) != rows)):
            raise EmbeddingMismatch(
                f"an embedding has {rows} rows of {columns} and the grid {self.grid}; expected one row a patch"
            )
        if self.clip is not None and (self.grid is None or len(self.clip.at_s) != self.grid[0]):
            raise EmbeddingMismatch(
                f"an embedding of a video has {len(self.clip.at_s)} times and the grid {self.grid}; expected one a step"
            )


def parse_handle(given: Mapping[str, Any]) -> EmbeddingHandle:
    """Raises EmbeddingMismatch for what :meth:`EmbeddingHandle.to_dict` did not make."""
    try:
        handle = msgspec.convert(given, EmbeddingHandle)
    except (msgspec.ValidationError, ValueError) as error:
        raise EmbeddingMismatch(f"an embedding's handle can't be read ({error}); send it unchanged") from error
    if handle.version != FORMAT_VERSION:
        raise EmbeddingMismatch(
            f"an embedding's handle has format version {handle.version}, this process reads {FORMAT_VERSION}; run the "
            "same trtx version on both"
        )
    offer = handle.nixl
    if offer is not None and (
        offer.block_bytes < 1
        or len(offer.block_ids) != -(-handle.nbytes // offer.block_bytes)
        or not all(0 <= block < offer.num_blocks for block in offer.block_ids)
    ):
        raise EmbeddingMismatch(
            f"an embedding's handle names {len(offer.block_ids)} blocks of {offer.block_bytes} bytes, of "
            f"{offer.num_blocks}, for {handle.nbytes}; send it unchanged"
        )
    return handle


# The first use of this type happens here, in the one thread that imports: see llm_args.
msgspec.msgpack.Decoder(EmbeddingHandle)
