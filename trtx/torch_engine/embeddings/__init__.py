"""Media embeddings between processes of two stages: from the process that encoded an image to the one that prefills it.

It owns the handle that travels as JSON, the leases on embeddings that wait for a reader, and the ways to read them: the
file of a :class:`~trtx.ipc.shared_tensor.SharedTensor` if both processes share a scratch directory (its data may stay
on the encoder's GPU, from which an engine on the same host copies it: ``device``), NIXL otherwise. It does not encode,
cache or retry. Senders use :class:`EmbeddingExports`, receivers :class:`EmbeddingReader`.

Two invariants always hold. Leased embeddings are bounded in bytes, and every lease ends, by its single reader or by its
deadline, even if either side dies. The rows, width, dtype and grid of a received embedding are those of its handle.
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
