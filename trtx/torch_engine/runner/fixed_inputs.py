"""Memory of which CUDA graphs read their inputs: at the same place in every replay, filled by one copy."""

# torch leaves its events untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Int32 = npt.NDArray[np.int32]


class _Staging:
    """Pinned memory that a step's inputs are copied from."""

    def __init__(self, size: int) -> None:
        self.host = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self.values: Int32 = self.host.numpy()  # the same memory
        self.copied: Any = torch.cuda.Event()


class FixedInputs:
    """``tensor`` [size] int32 on the device. On a CPU the host writes into it itself."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int32, device=device)
        # Two, as the step before may not have begun.
        self._staging = [_Staging(size) for _ in range(2)] if device.type == "cuda" else []

    def values(self) -> Int32:
        """[size], to be written as far as the next :meth:`send` says. Waits for the step before the last one."""
        if not self._staging:
            return self.tensor.numpy()
        self._staging.reverse()
        self._staging[0].copied.synchronize()
        return self._staging[0].values

    def send(self, count: int) -> None:
        """Enqueues a copy of the first ``count``: adjacent memory alone takes pinned memory without a detour."""
        if self._staging:
            staging = self._staging[0]
            self.tensor[:count].copy_(staging.host[:count], non_blocking=True)
            staging.copied.record()


def stride(count: int) -> int:
    """Elements from one kind of input to the next: whole 16 bytes, as kernels are compiled once for such addresses."""
    return -(-count // 4) * 4
