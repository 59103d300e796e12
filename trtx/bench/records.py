"""aiperf's record of one request, reduced to the values that metrics and checks use."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trtx.bench.failures import reason

RECORDS_FILE = "profile_export.jsonl"  # aiperf 0.13.0, --export-level records
NAMED_MODELS = "trtx_named_models"  # trtx's field in a record's metadata (endpoint/naming.py)
ANSWER_FORMAT = "trtx_answer_format"  # another (endpoint/formats.py)

_Phase = Literal["warmup", "profiling"]  # aiperf's CreditPhase


@dataclass(frozen=True, slots=True)
class RecordedFormat:
    """The answer format that a request asked for, and whether its answer has it.

    ``asked``: ``format`` for the text, ``tools``, both, or none. ``outcome``: ``kept``, ``cut``, ``broken``,
    ``unchecked`` or ``free`` (``answer_formats``); None for an answer that is not complete, or that may have any form.
    ``reason``: why the answer is broken or unchecked.
    """

    asked: tuple[str, ...] = ()
    outcome: str | None = None
    reason: str = ""

    @property
    def is_bound(self) -> bool:
        """Whether the answer had to follow a format."""
        return self.outcome not in (None, "free")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. A metric that can't be computed is None; a failed request has none at all."""

    start_ns: int
    end_ns: int
    error: str | None
    time_to_first_token: float | None  # ms
    inter_token_latency: float | None  # ms
    request_latency: float | None  # ms
    input_sequence_length: float | None  # tokens
    output_sequence_length: float | None  # tokens
    credit_issued_ns: int | None = None  # when the request was due; aiperf has none when it replays a schedule
    cached_input_tokens: float | None = None  # tokens found in the prefix cache; None: not in the usage
    image_count: float | None = None  # None: aiperf counted no images
    models: tuple[str, ...] = ()  # model names in the answer; empty: it names none, or they were not recorded
    answer_format: RecordedFormat | None = None  # None: not recorded
    request_id: str | None = None  # sent as X-Request-ID; None: not recorded
    # aiperf's other metrics that formulas read (``reads`` of a metric's record), by aiperf's name
    others: Mapping[str, float] = field(default_factory=dict)

    @property
    def succeeded(self) -> bool:
        """Whether the answer was complete. trtx's endpoint makes aiperf record an error otherwise."""
        return self.error is None

    @property
    def is_counted(self) -> bool:
        """Whether the server reported the answer's token count."""
        return self.output_sequence_length is not None

    def value(self, name: str) -> float | None:
        """A metric of the request by aiperf's name; None if aiperf recorded no number for it."""
        return getattr(self, name) if name in self.__slots__ else self.others.get(name)


_others: set[str] = set()


def read_also(names: Iterable[str]) -> None:
    """Adds metrics of aiperf to those that are read from its records into ``RequestRecord.others``."""
    _others.update(names)


@dataclass(frozen=True, slots=True)
class TrialRecords:
    """The requests of one aiperf run, including failures."""

    warm_up: tuple[RequestRecord, ...]
    measured: tuple[RequestRecord, ...]


def read_records(path: Path) -> tuple[RequestRecord, ...]:
    """The measured requests of one aiperf run, including failures but without warm-up."""
    return read_trial(path).measured


def read_trial(path: Path) -> TrialRecords:
    """All requests of one aiperf run, by phase. Raises ValueError if the file ends within a line."""
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
        """The metric's value; None if it is missing or not a number (null in JSON)."""
        found = metrics.get(tag, {}).get("value")
        return float(found) if found is not None and math.isfinite(found) else None

    if error is None and metadata.get("was_cancelled"):
        error = {"type": "cancelled", "message": "cancelled before it ended"}
    return RequestRecord(
        start_ns=metadata["request_start_ns"],
        end_ns=metadata["request_end_ns"],
        error=None if error is None else reason(error),
        time_to_first_token=value("time_to_first_token"),
        # 0: all tokens came in one piece, so there is no time between tokens.
        inter_token_latency=value("inter_token_latency") or None,
        request_latency=value("request_latency"),
        input_sequence_length=value("input_sequence_length"),
        output_sequence_length=value("output_sequence_length"),
        credit_issued_ns=metadata.get("credit_issued_ns"),
        cached_input_tokens=value("usage_prompt_cache_read_tokens"),
        image_count=value("num_images"),
        models=tuple(metadata.get(NAMED_MODELS, ())),
        answer_format=_answer_format(metadata.get(ANSWER_FORMAT)),
        request_id=metadata.get("x_request_id"),
        others={name: found for name in _others if (found := value(name)) is not None},
    )


def _answer_format(row: dict[str, Any] | None) -> RecordedFormat | None:
    return None if row is None else RecordedFormat(tuple(row["asked"]), row.get("outcome"), row.get("reason") or "")
