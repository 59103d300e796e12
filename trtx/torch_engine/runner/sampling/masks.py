"""The tokens that each slot may sample in the next step (guided decoding), on host and device."""

# torch leaves its streams untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

UNLIMITED = -1
"""In ``rows``: the slot samples from the whole vocabulary."""


class TokenMasks:
    """Bit masks over the vocabulary, one row for each guided slot of a step.

    A slot has adjacent rows: one for its next token, and one more for each drafted token that the same step checks. The
    kernels read ``rows`` [slots] int32, the first row of each slot's mask or ``UNLIMITED``, and
    ``on_device`` [most rows, words] int32. On a CPU, ``on_device`` is the host's memory.
    """

    def __init__(self, max_batch_size: int, vocab_size: int, device: torch.device, rows_per_slot: int = 1) -> None:
        on_cuda = device.type == "cuda"
        slots = max_batch_size + 1  # the last one is the padding slot
        shape = (max_batch_size * rows_per_slot, -(-vocab_size // 32))
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=on_cuda)
        self._host_rows = torch.full((slots,), UNLIMITED, dtype=torch.int32, pin_memory=on_cuda)
        self.values: npt.NDArray[np.int32] = self._host.numpy()
        """The host's masks; see ``ModelRunner.masks``."""
        self.on_device = torch.zeros(shape, dtype=torch.int32, device=device) if on_cuda else self._host
        self.rows = torch.full((slots,), UNLIMITED, dtype=torch.int32, device=device) if on_cuda else self._host_rows
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._is_set = False

    def limit(self, slots: Sequence[int], rows_per_slot: int = 1) -> None:
        """Limits ``slots[i]`` to the masks that begin at row ``i * rows_per_slot``, and no other slot.

        If ``slots`` is not empty, no step in flight may use the masks. The copy runs while the device computes the
        forward in flight, and work that the caller enqueues afterwards waits for the copy.
        """
        if not slots:
            if self._is_set:
                self.rows.fill_(UNLIMITED)
            self._is_set = False
            return
        rows = self._host_rows.numpy()
        rows.fill(UNLIMITED)
        rows[list(slots)] = np.arange(len(slots), dtype=np.int32) * rows_per_slot
        self._is_set = True
        if self._stream is None:
            return
        count = len(slots) * rows_per_slot
        with torch.cuda.stream(self._stream):
            self.on_device[:count].copy_(self._host[:count], non_blocking=True)
            self.rows.copy_(self._host_rows, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._stream)

    def banned(self, slot: int, vocab_size: int, place: int = 0) -> Tensor | None:
        """On a CPU: ``[vocab]`` bool, True for tokens that the slot must not sample after ``place`` drafted tokens.

        None for an unlimited slot.
        """
        row = int(self.rows[slot])
        if row == UNLIMITED:
            return None
        bits = np.unpackbits(self.values[row + place].view(np.uint8), count=vocab_size, bitorder="little")
        return torch.from_numpy(bits == 0)
