"""Makes OpenTelemetry spans of an ended request from its row. Nothing is traced while the request runs."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from trtx.worker.requests.stage_clock import EndedRequest

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1  # flag of a W3C traceparent
_INTERNAL, _SERVER = 1, 2  # SpanKind of OTLP
_ERROR = 2  # StatusCode of OTLP

Span = dict[str, Any]
"""One span as OTLP's JSON encoding has it."""


def spans_of(row: EndedRequest, trace_headers: Mapping[str, str] | None) -> list[Span]:
    """The worker's span and its stages, as children of the span that ``traceparent`` names; empty if it names none.

    A stage that was not measured has no span.
    """
    found = _TRACEPARENT.fullmatch((trace_headers or {}).get("traceparent", ""))
    if found is None or not int(found[3], 16) & _SAMPLED:
        return []
    trace_id, parent = found[1], found[2]
    whole = _span(trace_id, parent, f"trtx.{row.role}", row.arrived_ns, row.ended_s, kind=_SERVER)
    counts = {"prompt_tokens": row.prompt_tokens, "cached_tokens": row.cached_tokens, "tokens": row.tokens}
    whole["attributes"] = _attributes({"request_id": row.id, "worker": row.worker, "outcome": row.outcome, **counts})
    whole["events"] = [
        {"timeUnixNano": str(row.arrived_ns + round(1e9 * at_s)), "name": name}
        for name, at_s in (("first chunk", row.first_chunk_s), ("last chunk", row.last_chunk_s))
        if at_s is not None
    ]
    if row.outcome in ("error", "invalid"):
        whole["status"] = {"code": _ERROR, "message": row.outcome}
    stages = [
        _span(trace_id, whole["spanId"], name, row.arrived_ns + round(1e9 * begun_s), seconds)
        for name, begun_s, seconds in _stages(row)
    ]
    return [whole, *stages]


def _stages(row: EndedRequest) -> Iterator[tuple[str, float, float]]:
    """Name, begin after the arrival, and length of each measured stage, in seconds."""
    if row.submitted_s is None:
        return
    if row.media_s is not None:
        yield "media", max(0.0, row.submitted_s - row.media_s), row.media_s
    at_s = row.submitted_s
    # A failed read comes before the prefill that replaces it.
    for name, seconds in (
        ("queue", row.queue_s), ("handoff", row.read_s), ("prefill", row.prefill_s), ("first step", row.first_step_s),
        ("decode", row.decode_s),
    ):  # fmt: skip
        if seconds is not None:
            yield name, at_s, seconds
            at_s += seconds


def _span(trace_id: str, parent: str, name: str, start_ns: int, seconds: float, kind: int = _INTERNAL) -> Span:
    return {
        "traceId": trace_id,
        "spanId": secrets.token_hex(8),
        "parentSpanId": parent,
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(start_ns),
        "endTimeUnixNano": str(start_ns + round(1e9 * seconds)),
    }


def _attributes(values: Mapping[str, str | int | None]) -> list[dict[str, Any]]:
    return [
        {"key": f"trtx.{name}", "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)}}
        for name, value in values.items()
        if value is not None
    ]
