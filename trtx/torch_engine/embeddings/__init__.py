"""Embeddings between the processes of two stages: from whoever encoded a picture to whoever prefills with it.

Owns the handle that travels as JSON, what is kept for its reader and until when, and the ways to it: the file of a
:class:`~trtx.ipc.shared_tensor.SharedTensor` where both have one scratch directory, whose data stay on the
encoder's GPU where an engine of the same host takes them from there (``device``); NIXL elsewhere. It does not encode,
cache or retry. Enter through :class:`EmbeddingExports` at one end and :class:`EmbeddingReader` at the other. It always
holds that what is under lease is bounded in bytes and ends: by its one reader, or by its deadline, whatever becomes of
either side; and that rows, width, dtype and grid of what arrives are those of the handle.
"""

from trtx.torch_engine.embeddings.exports import EmbeddingExports, NoRoom
from trtx.torch_engine.embeddings.handle import (
    EmbeddingGone,
    EmbeddingHandle,
    EmbeddingMismatch,
    EmbeddingUnreachable,
    parse_handle,
)
from trtx.torch_engine.embeddings.reader import EmbeddingReader

__all__ = [
    "EmbeddingExports",
    "EmbeddingGone",
    "EmbeddingHandle",
    "EmbeddingMismatch",
    "EmbeddingReader",
    "EmbeddingUnreachable",
    "NoRoom",
    "parse_handle",
]
