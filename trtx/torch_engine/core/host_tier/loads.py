"""A load: the copy of a sequence's KV blocks from host memory to the device."""

from __future__ import annotations

from dataclasses import dataclass

from trtx.torch_engine.block_copies import BlockCopy
from trtx.torch_engine.core.sequence import Sequence


@dataclass(slots=True, eq=False)
class HostLoad:
    """Blocks that are copied to the device while their sequence waits.

    The load holds its blocks on the host and on the device until the copy is done, even if the sequence is cancelled
    or gives up waiting.
    """

    sequence: Sequence
    names: list[bytes]
    host_ids: list[int]
    device_ids: list[int]
    num_tokens: int  # tokens of the sequence whose KV is on the device once the load is done
    began: float = 0.0
    copy: BlockCopy | None = None  # None: not started yet
    is_abandoned: bool = False  # the sequence waits no longer
