"""Loads: contents on their way from host memory to the device."""

from __future__ import annotations

from dataclasses import dataclass

from trtx.torch_engine.block_copies import BlockCopy
from trtx.torch_engine.core.sequence import Sequence


@dataclass(slots=True, eq=False)
class HostLoad:
    """Blocks that a sequence waits for. The load has a reference to each block on both sides until the copy is done.

    It outlives its sequence: if that is cancelled or waits no longer, the blocks stay held until the copy is done.
    """

    sequence: Sequence
    names: list[bytes]
    host_ids: list[int]
    device_ids: list[int]
    num_tokens: int  # in place once the load is done
    began: float = 0.0
    copy: BlockCopy | None = None  # None: not started yet
    is_abandoned: bool = False  # the sequence waits no longer
