"""The handle that describes a leased embedding to its reader."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Literal

import msgspec

from trtx.ipc.encoder_messages import Clip, Grid
from trtx.ipc.shared_tensor import DTYPE_BYTES

FORMAT_VERSION = 1


class EmbeddingGone(Exception):
    """The embedding expired, another reader took it, or its keeper is gone: encode the image again."""


class EmbeddingUnreachable(Exception):
    """The embedding is on an encoder's device whose memory this process can never open: request it as a file."""


class EmbeddingMismatch(Exception):
    """The embedding does not fit this model, or the handle is invalid: encoding again would give the same."""


class NixlEmbeddingOffer(msgspec.Struct, frozen=True, kw_only=True):
    """How NIXL reaches the blocks of an embedding, from any host. They are in CPU memory."""

    agent_name: str  # unique to one incarnation of one agent
    agent_metadata: bytes  # how to connect to it, in NIXL's format
    base_address: int  # of block 0
    num_blocks: int  # of the whole arena
    block_bytes: int
    block_ids: tuple[int, ...]  # of the embedding, in order; the last may be partly used
    lease_id: int


class EmbeddingHandle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One embedding for one reader. ``tensor_size`` is ``[rows, width]``; the name is from TensorRT-LLM's handles."""

    version: int = FORMAT_VERSION
    tensor_size: tuple[int, int]
    dtype: Literal["bfloat16", "float16", "float32"]
    key: bytes
    grid: Grid | None = None  # of the rows, in merged patches
    clip: Clip | None = None  # of a video
    deadline_s: float  # Unix seconds
    path: str | None = None  # of the shared tensor, for a reader with the same scratch directory
    nixl: NixlEmbeddingOffer | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.tensor_size) * DTYPE_BYTES[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        """Returns builtin types for JSON; bytes become base64."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def check(self, *, width: int | None = None, dtype: str | None = None) -> None:
        """Raises EmbeddingMismatch if the embedding can't have ``width`` columns in ``dtype``, or if its fields
        contradict each other.

        None: unknown in this process; the process that computes with the rows checks it.
        """
        rows, columns = self.tensor_size
        if columns != (width or columns) or self.dtype != (dtype or self.dtype):
            raise EmbeddingMismatch(
                f"an embedding has {columns} columns of {self.dtype}; expected {width or columns} of "
                f"{dtype or self.dtype}: give encoder and decoder the same model and dtype"
            )
        if rows < 1 or columns < 1 or (self.grid is not None and (min(self.grid) < 1 or prod(self.grid) != rows)):
            raise EmbeddingMismatch(
                f"an embedding has {rows} rows of {columns} and the grid {self.grid}; expected one row for each patch"
            )
        if self.clip is not None and (self.grid is None or len(self.clip.at_s) != self.grid[0]):
            raise EmbeddingMismatch(
                f"an embedding of a video has {len(self.clip.at_s)} times and the grid {self.grid}; expected one time "
                "for each step of the grid"
            )


def parse_handle(given: Mapping[str, Any]) -> EmbeddingHandle:
    """Inverse of :meth:`EmbeddingHandle.to_dict`. Raises EmbeddingMismatch for any other content."""
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
            f"an embedding's handle names {len(offer.block_ids)} of {offer.num_blocks} blocks of {offer.block_bytes} "
            f"bytes, which do not fit its {handle.nbytes} bytes; send the handle unchanged"
        )
    return handle


# The first use of this type happens here, in the importing thread: see llm_args.
msgspec.msgpack.Decoder(EmbeddingHandle)
