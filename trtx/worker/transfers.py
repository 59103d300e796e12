"""What a worker itself can say of KV handoffs: who began without one, and of each request whether KV came for it and
from whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtx.engine.api import Transfer
from trtx.engine.handoff_facts import OUTCOMES, Outcome, outcome_of
from trtx.engine.worker_status import HandoffsSoFar


@dataclass(slots=True)
class PairCounts:
    """Of the requests that one prefill worker handed to this one."""

    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    bytes: int = 0
    seconds: float = 0.0  # summed over reads


class TransferCounts:
    """Of one worker. A prefill worker reads nothing, and its counts stay 0."""

    def __init__(self) -> None:
        self.pairs: dict[str, PairCounts] = {}  # by the prefill worker's name; "": it did not say it
        self.whole = 0  # requests that decode served from their prompt on
        self.because = ""  # why the last prompt was recomputed, and whose it was
        self.recomputed_from = ""

    @property
    def is_known(self) -> bool:
        """False where the engine leaves out what its requests took."""
        return not self.count("unknown")

    @property
    def reads(self) -> int:
        return self.count("read")

    @property
    def bytes(self) -> int:
        return sum(pair.bytes for pair in self.pairs.values())

    @property
    def seconds(self) -> float:
        return sum(pair.seconds for pair in self.pairs.values())

    def count(self, outcome: Outcome) -> int:
        return sum(pair.outcomes[outcome] for pair in self.pairs.values())

    def so_far(self) -> HandoffsSoFar:
        """For the launcher."""
        return HandoffsSoFar(
            read=self.reads,
            recomputed=self.count("recomputed"),
            whole=self.whole,
            recomputed_from=self.recomputed_from,
            because=self.because,
        )

    def ended(self, transfer: Transfer | None, prefill: str | None = None) -> None:
        """A request that began with ``prefill``'s handoff has ended, by the engine's own word. None: nothing was said
        of it."""
        pair = self.pairs.setdefault(prefill or "", PairCounts())
        outcome = outcome_of(transfer)
        pair.outcomes[outcome] += 1
        if transfer is None:
            return
        pair.bytes += transfer.bytes
        pair.seconds += transfer.seconds
        if outcome == "recomputed":
            self.because, self.recomputed_from = transfer.recomputed_because, prefill or ""
