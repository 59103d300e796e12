"""Sums over the iteration statistics of an engine, whose rows arrive once a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from trtx.worker.bucket_counts import LATENCY_BUCKETS, BucketCounts
from trtx.worker.iteration_rows import StepNumbers
from trtx.worker.served_families import speculation_families, step_families


class StepTotals:
    """Sums over the steps of all ranks of one engine. Only the polling thread adds to it."""

    def __init__(self) -> None:
        self._seconds = BucketCounts(LATENCY_BUCKETS)
        self._prompt_tokens = self._decodes = self._admitted = 0
        self._queue_seconds = 0.0
        self._wait_seconds: float | None = None  # None: the engine does not report it
        self._steps = StepNumbers()
        self._has_steps = False
        self._drafts: DraftTotals | None = None  # None: the engine does not speculate

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a step. Ignores a row that repeats a step, and the rows of an engine that reports no steps."""
        batch = row.get("inflightBatchingStats")
        if not batch or not self._steps.is_new(row):
            return
        self._has_steps = True
        self._seconds.observe(row["iterLatencyMS"] / 1e3)
        self._prompt_tokens += batch.get("numCtxTokens", 0)
        self._decodes += batch.get("numGenRequests", 0)
        if admitted := row.get("numNewActiveRequests", 0):
            self._admitted += admitted
            self._queue_seconds += admitted * row.get("newActiveRequestsQueueLatencyMS", 0.0) / 1e3
        if (wait := row.get("deviceWaitMS")) is not None:
            self._wait_seconds = (self._wait_seconds or 0.0) + wait / 1e3
        if drafts := row.get("specDecodingStats"):
            self._drafts = self._drafts or DraftTotals()
            self._drafts.add(drafts)

    def collect(self) -> Iterator[Any]:
        if not self._has_steps:
            return
        yield self._seconds.of(step_families.STEP_SECONDS)
        yield step_families.STEP_PROMPT_TOKENS.of(self._prompt_tokens)
        yield step_families.STEP_DECODES.of(self._decodes)
        yield step_families.ADMITTED_REQUESTS.of(self._admitted)
        yield step_families.ADMITTED_QUEUE_SECONDS.of(self._queue_seconds)
        if self._wait_seconds is not None:
            yield step_families.DEVICE_WAIT_SECONDS.of(self._wait_seconds)
        if self._drafts is not None:
            yield from self._drafts.collect()


class DraftTotals:
    """Sums over the drafts of all steps."""

    def __init__(self) -> None:
        self._drafts = 0
        self._seconds = 0.0
        self._drafted: Counter[str] = Counter()  # by position in the draft, from 1 on
        self._accepted: Counter[str] = Counter()

    def add(self, stats: Mapping[str, Any]) -> None:
        """Adds a step's ``specDecodingStats``. Only the torch engine has counts by position."""
        self._drafts += stats["numRequestsWithDraftTokens"]
        self._seconds += stats["iterLatencyMS"] / 1e3
        for total, name in ((self._drafted, "numDraftTokens"), (self._accepted, "numAcceptedTokens")):
            if (by_position := stats.get(f"{name}ByPosition")) is None:
                total["unknown"] += stats[name]
            else:
                total.update({str(place): count for place, count in enumerate(by_position, 1)})

    def collect(self) -> Iterator[Any]:
        yield speculation_families.DRAFTS.of(self._drafts)
        for family, total in (
            (speculation_families.DRAFT_TOKENS, self._drafted),
            (speculation_families.ACCEPTED_DRAFT_TOKENS, self._accepted),
        ):
            yield family.family([((position,), count) for position, count in total.items()])
        yield speculation_families.DRAFTING_SECONDS.of(self._seconds)
