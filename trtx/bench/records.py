"""aiperf's record of one request, reduced to what the figures and the checks of a cell need."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtx.bench.failures import reason

RECORDS_FILE = "profile_export.jsonl"  # aiperf 0.13.0, --export-level records
NAMED_MODELS = "trtx_named_models"  # our own field of a record's metadata (endpoint/naming.py)

_Phase = Literal["warmup", "profiling"]  # aiperf's CreditPhase


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. A metric is None where it can't be computed: all of them, when the request failed."""

    start_ns: int
    end_ns: int
    error: str | None
    time_to_first_token: float | None  # ms
    inter_token_latency: float | None  # ms
    request_latency: float | None  # ms
    input_sequence_length: float | None  # tokens
    output_sequence_length: float | None  # tokens
    credit_issued_ns: int | None = None  # when it was due; aiperf has none where it replays a schedule
    cached_input_tokens: float | None = None  # of the input, found in the prefix cache; None: the usage does not say
    image_count: float | None = None  # None: it has none, as far as aiperf counted
    models: tuple[str, ...] = ()  # that the answer says it is of; none: it names none, or nobody looked

    @property
    def succeeded(self) -> bool:
        """Its answer was whole: our endpoint saw to it that aiperf recorded an error otherwise."""
        return self.error is None

    @property
    def is_counted(self) -> bool:
        """The server said how many tokens its answer has."""
        return self.output_sequence_length is not None


@dataclass(frozen=True, slots=True)
class TrialRecords:
    """The requests of one aiperf run, failures too."""

    warm_up: tuple[RequestRecord, ...]
    measured: tuple[RequestRecord, ...]


def read_records(path: Path) -> tuple[RequestRecord, ...]:
    """The measured requests of one aiperf run: warm-up is left out, failures are kept."""
    return read_trial(path).measured


def read_trial(path: Path) -> TrialRecords:
    """All requests of one aiperf run, by phase. ValueError where the file breaks off within a line."""
    phases: dict[_Phase, list[RequestRecord]] = {"warmup": [], "profiling": []}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                entry = json.loads(line)
                record = _record(entry["metadata"], entry.get("metrics") or {}, entry.get("error"))
                phases[entry["metadata"]["benchmark_phase"]].append(record)
    return TrialRecords(tuple(phases["warmup"]), tuple(phases["profiling"]))


def _record(metadata: dict[str, Any], metrics: dict[str, Any], error: dict[str, Any] | None) -> RequestRecord:
    def value(tag: str) -> float | None:
        """What is no number, as JSON has null for, nobody measured."""
        found = metrics.get(tag, {}).get("value")
        return float(found) if found is not None and math.isfinite(found) else None

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
        credit_issued_ns=metadata.get("credit_issued_ns"),
        cached_input_tokens=value("usage_prompt_cache_read_tokens"),
        image_count=value("num_images"),
        models=tuple(metadata.get(NAMED_MODELS, ())),
    )
