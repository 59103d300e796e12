"""An image before and after the encoder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trtx.ipc.encoder_messages import Grid
from trtx.ipc.shared_tensor import SharedTensor, remove_shared


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """One image, as the checkpoint's own image processor prepared it.

    The tensor's creator removes it after the answer. ``pixels``: float32, ``[1, 3, height, width]`` from CLIP's
    processor, ``[patches, values]`` from Qwen's. ``grid``: time, height and width in patches, before merging; None for
    processors that give none.
    """

    key: bytes
    pixels: SharedTensor
    grid: Grid | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of one image: one row of ``tensor`` for each placeholder.

    The owner of the object removes the tensor. ``tensor``: ``[rows, hidden]`` in the decoder's ``dtype``. ``grid``:
    time, height and width of the rows, in merged patches; None for models whose images all have the same size.
    """

    key: bytes
    tensor: SharedTensor
    grid: Grid | None

    @property
    def rows(self) -> int:
        return self.tensor.shape[0]

    @property
    def hidden(self) -> int:
        """Number of columns; with deepstack, all levels side by side."""
        return self.tensor.shape[1]

    @property
    def dtype(self) -> str:
        return self.tensor.dtype


def discard(embeddings: Iterable[Embedding]) -> None:
    """Removes the tensors of unused embeddings."""
    for one in embeddings:
        remove_shared(one.tensor)
