"""Embeddings of media on their way from a file to the device."""

# torch leaves its streams untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch

from trtx.torch_engine.batch import Embedding
from trtx.torch_engine.shared_tensor import SharedTensor, SharedTensorError, open_shared


class EmbeddingLoader:
    """Checks and copies, in any thread: on CUDA on a stream of its own, so that a copy waits for no step, nor a step
    for it."""

    def __init__(self, device: torch.device, width: int, dtype: torch.dtype) -> None:
        self._device = device
        self._width = width
        self._dtype = dtype
        self._stream: Any = None
        if device.type == "cuda":
            self._stream, self._steps = torch.cuda.Stream(device), torch.cuda.current_stream(device)

    @torch.inference_mode()
    def load(self, shared: SharedTensor) -> Embedding:
        """Raises ValueError for what is no ``[rows, width]`` of finite numbers in the model's dtype."""
        wanted = str(self._dtype).removeprefix("torch.")
        shape = shared.shape
        if len(shape) != 2 or shape[0] < 1 or shape[1] != self._width or shared.dtype != wanted:
            raise ValueError(
                f"it is {shared.dtype} of shape {list(shape)}; expected {wanted} of shape [rows, {self._width}], "
                "as this model has them"
            )
        try:
            mapped = open_shared(shared)
        except SharedTensorError as error:
            raise ValueError(str(error)) from error
        if not torch.isfinite(mapped).all():
            raise ValueError("it holds numbers that are NaN or infinite; expected finite ones")
        if self._stream is None:
            return Embedding(shape[0], mapped.clone())
        with torch.cuda.stream(self._stream):
            copied = mapped.to(self._device)
        self._stream.synchronize()
        copied.record_stream(self._steps)  # its memory is given to another copy only once steps have read it
        return Embedding(shape[0], copied)
