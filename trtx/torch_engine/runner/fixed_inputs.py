"""Static input buffers for CUDA graphs: at the same address in every replay, filled by one copy."""

# torch leaves its events untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Int32 = npt.NDArray[np.int32]


class _Staging:
    """Pinned host memory, the source of a step's input copy."""

    def __init__(self, size: int) -> None:
        self.host = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self.values: Int32 = self.host.numpy()  # shares memory with host
        self.copied: Any = torch.cuda.Event()


class FixedInputs:
    """``tensor`` [size] int32 on the device. On a CPU the host writes directly into it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int32, device=device)
        # Two staging buffers: the copy of the previous step may not have started yet.
        self._staging = [_Staging(size) for _ in range(2)] if device.type == "cuda" else []

    def values(self) -> Int32:
        """Returns the host buffer [size]; write as many values as the next :meth:`send` copies.

        Waits for the copy of the step before the last one.
        """
        if not self._staging:
            return self.tensor.numpy()
        self._staging.reverse()
        self._staging[0].copied.synchronize()
        return self._staging[0].values

    def send(self, count: int) -> None:
        """Enqueues a copy of the first ``count`` values.

        The copied range is contiguous: torch would stage any other range in memory that is not pinned.
        """
        if self._staging:
            staging = self._staging[0]
            self.tensor[:count].copy_(staging.host[:count], non_blocking=True)
            staging.copied.record()


def stride(count: int) -> int:
    """Elements reserved for one input: multiples of 16 bytes, because kernels are specialised for aligned addresses."""
    return -(-count // 4) * 4
