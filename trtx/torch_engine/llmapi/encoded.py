"""A picture before and after the encoder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trtx.ipc.encoder_messages import Grid
from trtx.ipc.shared_tensor import SharedTensor, remove_shared


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """One picture as the checkpoint's own image processor gave it. Who made the tensor removes it, after the answer.

    ``pixels``: float32, ``[1, 3, height, width]`` of CLIP's processor, ``[patches, values]`` of Qwen's.
    ``grid``: time, height and width in patches, before any are merged; None for a processor that gives none.
    """

    key: bytes
    pixels: SharedTensor
    grid: Grid | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """Of one picture: a row of ``tensor`` in place of each of its placeholders. Whoever has it removes the tensor.

    ``tensor``: ``[rows, hidden]`` in ``dtype``, the decoder's. ``grid``: of the rows, time, height and width in merged
    patches; None of a model whose pictures all have the same.
    """

    key: bytes
    tensor: SharedTensor
    grid: Grid | None

    @property
    def rows(self) -> int:
        return self.tensor.shape[0]

    @property
    def hidden(self) -> int:
        """Columns; of a model with deepstack all its levels beside one another."""
        return self.tensor.shape[1]

    @property
    def dtype(self) -> str:
        return self.tensor.dtype


def discard(embeddings: Iterable[Embedding]) -> None:
    """Removes the tensors of embeddings that nobody will use."""
    for one in embeddings:
        remove_shared(one.tensor)
