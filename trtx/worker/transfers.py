"""What a worker itself can say of KV handoffs: who began without one, and of each request whether KV came for it, where
its engine counts none."""

from __future__ import annotations

from trtx.engine.api import Transfer


class TransferCounts:
    """Of one worker. A prefill worker reads nothing, and its counts stay 0."""

    def __init__(self) -> None:
        self.reads = 0
        self.bytes = 0
        self.seconds = 0.0  # summed over reads
        self.whole = 0  # requests that decode served from their prompt on
        self.untold = 0  # ended well, and nobody said whether KV came

    @property
    def is_known(self) -> bool:
        """False where the engine leaves out what its requests took."""
        return not self.untold

    def ended(self, transfer: Transfer | None) -> None:
        """A request that began with a handoff has ended, by the engine's own word. None: nothing was said of it."""
        if transfer is None:
            self.untold += 1
        elif transfer.seconds > 0:
            self.reads += 1
            self.bytes += transfer.bytes
            self.seconds += transfer.seconds
