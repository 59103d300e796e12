"""Counts KV handoffs as a worker sees them: requests without one, and the outcome per prefill worker of all others."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtx.engine.api import Transfer
from trtx.engine.handoff_facts import OUTCOMES, Outcome, outcome_of
from trtx.engine.worker_status import HandoffsSoFar


@dataclass(slots=True)
class PairCounts:
    """Counts of the requests that one prefill worker handed to this worker."""

    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    bytes: int = 0
    seconds: float = 0.0  # summed over reads


class TransferCounts:
    """Handoff counts of one worker. A prefill worker reads no KV, so its counts stay 0."""

    def __init__(self) -> None:
        self.pairs: dict[str, PairCounts] = {}  # by the prefill worker's name; "" if it did not give one
        self.whole = 0  # requests without a handoff, though a prefill worker should have had them
        self.local = 0  # prompts that the router left to this decode worker
        self.because = ""  # why the last prompt was recomputed, and which prefill worker had computed it
        self.recomputed_from = ""

    @property
    def is_known(self) -> bool:
        """False if the engine does not report the transfers of its requests."""
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
        """The totals for the status file."""
        return HandoffsSoFar(
            read=self.reads,
            recomputed=self.count("recomputed"),
            whole=self.whole,
            local=self.local,
            recomputed_from=self.recomputed_from,
            because=self.because,
        )

    def ended(self, transfer: Transfer | None, prefill: str | None = None) -> None:
        """Counts a finished request that began with a handoff from ``prefill``.

        ``transfer`` None: the engine reported nothing.
        """
        pair = self.pairs.setdefault(prefill or "", PairCounts())
        outcome = outcome_of(transfer)
        pair.outcomes[outcome] += 1
        if transfer is None:
            return
        pair.bytes += transfer.bytes
        pair.seconds += transfer.seconds
        if outcome == "recomputed":
            self.because, self.recomputed_from = transfer.recomputed_because, prefill or ""
