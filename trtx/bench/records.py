"""aiperf's record of one request, reduced to what the figures need."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.bench.failures import reason

RECORDS_FILE = "profile_export.jsonl"  # aiperf 0.13.0, --export-level records


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One measured request. A metric is None where it can't be computed: all of them, when the request failed."""

    start_ns: int
    end_ns: int
    error: str | None
    time_to_first_token: float | None  # ms
    inter_token_latency: float | None  # ms
    request_latency: float | None  # ms
    input_sequence_length: float | None  # tokens
    output_sequence_length: float | None  # tokens

    @property
    def succeeded(self) -> bool:
        """Its answer was whole: our endpoint saw to it that aiperf recorded an error otherwise."""
        return self.error is None

    @property
    def is_counted(self) -> bool:
        """The server said how many tokens its answer has."""
        return self.output_sequence_length is not None


def read_records(path: Path) -> tuple[RequestRecord, ...]:
    """The measured requests of one aiperf run: warm-up is left out, failures are kept."""
    with path.open(encoding="utf-8") as lines:
        return tuple(_measured(json.loads(line) for line in lines if line.strip()))


def _measured(entries: Iterable[dict[str, Any]]) -> Iterable[RequestRecord]:
    for entry in entries:
        metadata = entry["metadata"]
        if metadata["benchmark_phase"] == "profiling":
            yield _record(metadata, entry.get("metrics") or {}, entry.get("error"))


def _record(metadata: dict[str, Any], metrics: dict[str, Any], error: dict[str, Any] | None) -> RequestRecord:
    def value(tag: str) -> float | None:
        return float(metrics[tag]["value"]) if tag in metrics else None

    if error is None and metadata.get("was_cancelled"):
        error = {"type": "cancelled", "message": "cancelled before it ended"}
    return RequestRecord(
        start_ns=metadata["request_start_ns"],
        end_ns=metadata["request_end_ns"],
        error=None if error is None else reason(error),
        time_to_first_token=value("time_to_first_token"),
        # 0: all tokens came in one piece, so there is no time between them to measure.
        inter_token_latency=value("inter_token_latency") or None,
        request_latency=value("request_latency"),
        input_sequence_length=value("input_sequence_length"),
        output_sequence_length=value("output_sequence_length"),
    )
