"""Copies media embeddings from a shared file, or from an encoder's device, to the runner's device."""

# torch leaves its streams untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trtx.ipc.shared_tensor import SharedTensor, SharedTensorElsewhere, SharedTensorError, open_shared
from trtx.torch_engine.step import StepEmbedding

if TYPE_CHECKING:
    from trtx.torch_engine.embeddings.device import DeviceReader


class EmbeddingLoader:
    """Validates and copies embeddings, in any thread.

    On CUDA it uses its own stream, so that copies and steps do not wait for each other.
    """

    def __init__(self, device: torch.device, width: int, dtype: torch.dtype) -> None:
        self._device = device
        self._width = width
        self._dtype = dtype
        self._stream: Any = None
        self._reader: DeviceReader | None = None  # created on first use
        if device.type == "cuda":
            self._stream, self._steps = torch.cuda.Stream(device), torch.cuda.current_stream(device)

    @torch.inference_mode()
    def load(self, shared: SharedTensor) -> StepEmbedding:
        """Returns the embedding on the runner's device.

        Raises ValueError unless it is ``[rows, width]`` of finite numbers in the model's dtype; EmbeddingGone or
        EmbeddingUnreachable if it stayed on an encoder's device and can't be read from there.
        """
        wanted = str(self._dtype).removeprefix("torch.")
        shape = shared.shape
        if len(shape) != 2 or shape[0] < 1 or shape[1] != self._width or shared.dtype != wanted:
            raise ValueError(
                f"it is {shared.dtype} of shape {list(shape)}; expected {wanted} of shape [rows, {self._width}], "
                "as this model has them"
            )
        try:
            mapped = open_shared(shared)
        except SharedTensorElsewhere as there:
            return self._from_device(shared, there.place)
        except SharedTensorError as error:
            raise ValueError(str(error)) from error
        _check_finite(mapped)
        if self._stream is None:
            return StepEmbedding(shape[0], mapped.clone())
        with torch.cuda.stream(self._stream):
            copied = mapped.to(self._device)
        self._stream.synchronize()
        return self._for_steps(copied)

    def _from_device(self, shared: SharedTensor, place: bytes) -> StepEmbedding:
        from trtx.torch_engine.embeddings import EmbeddingMismatch
        from trtx.torch_engine.embeddings.device import DeviceReader

        if self._reader is None:
            self._reader = DeviceReader(self._device)
        try:
            if self._stream is None:
                copied = self._reader.read(shared, place)
                _check_finite(copied)
                return StepEmbedding(copied.shape[0], copied)
            with torch.cuda.stream(self._stream):
                copied = self._reader.read(shared, place)
                _check_finite(copied)
            return self._for_steps(copied)
        except EmbeddingMismatch as error:
            raise ValueError(str(error)) from error

    def _for_steps(self, copied: torch.Tensor) -> StepEmbedding:
        copied.record_stream(self._steps)  # reuse its memory only after steps have read it
        return StepEmbedding(copied.shape[0], copied)

    def close(self) -> None:
        """Releases the mappings of encoders' memory. No embedding can be loaded afterwards."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _check_finite(rows: torch.Tensor) -> None:
    if not torch.isfinite(rows).all():
        raise ValueError("it holds numbers that are NaN or infinite; expected finite ones")
