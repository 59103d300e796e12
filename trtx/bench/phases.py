"""Splits a trial into ramp, steady part and drain, by the times of its requests. Pure.

Other tools do this differently. SGLang's bench takes the longest interval above a share of the peak concurrency.
Triton's perf_analyzer repeats windows until their means agree. vLLM's bench and aiperf 0.13.0 divide by the whole run.
MLPerf's LoadGen requires runs so long that the edges vanish. A trtx trial is short and its load is known, so the edges
follow from the load.

The first requests reach an idle server all at once and queue for each other's prefill, so their TTFT reflects the start
and not the load (mlcommons/endpoints #86, modelscope/evalscope #1641). Therefore the ramp doesn't end when the
concurrency is reached, but when that many requests have ended since.

docs/validity.md has the definitions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from trtx.bench.records import RequestRecord

# Minimum mean share of a closed loop's slots in use. Below it, the actual load was not the requested one.
HELD_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open interval [start, end) in ns since 1970."""

    start_ns: int
    end_ns: int

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    def has(self, at_ns: int) -> bool:
        return self.start_ns <= at_ns < self.end_ns

    def share_of(self, start_ns: int, end_ns: int) -> float:
        """The share of the interval [``start_ns``, ``end_ns``) that lies in this span: 0 to 1. For an instant,
        0 or 1.
        """
        if end_ns <= start_ns:
            return float(self.has(start_ns))
        return max(0.0, min(end_ns, self.end_ns) - max(start_ns, self.start_ns)) / (end_ns - start_ns)


@dataclass(frozen=True, slots=True)
class Phases:
    """The three parts of a trial, with the content of the steady part."""

    ramp: Span
    steady: Span
    drain: Span
    sent_count: int  # requests sent in the steady part, over which latencies and lengths are computed
    mean_in_flight: float  # number of requests, over the steady part


@dataclass(frozen=True, slots=True)
class NoSteadyPart:
    """The reason why a trial has no steady part, as one clause."""

    reason: str
    remedy: str = ""  # what to do, if a longer trial would help
    mean_in_flight: float | None = None  # known if the edges were found but the concurrency wasn't held between them


def phases_of(records: Sequence[RequestRecord], concurrency: int | None) -> Phases | NoSteadyPart:
    """The phases of a trial's requests. ``concurrency`` None: an open loop."""
    return open_loop_phases(records) if concurrency is None else closed_loop_phases(records, concurrency)


def closed_loop_phases(records: Sequence[RequestRecord], concurrency: int) -> Phases | NoSteadyPart:
    """The phases of a load that keeps ``concurrency`` requests in flight.

    The steady part starts when, after all slots were in use, as many requests as there are slots have succeeded. It
    ends when the last request is sent, since no slot is refilled afterwards. At least one request per slot must be sent
    in it.
    """
    if none := _nothing_succeeded(records):
        return none
    reached_ns, most = _filled(records, concurrency)
    if reached_ns is None:
        return NoSteadyPart(f"never more than {most} of {concurrency} requests were in flight at a time")
    ends = sorted(record.end_ns for record in records if record.succeeded and record.end_ns > reached_ns)
    last_sent_ns = max(record.start_ns for record in records)
    sent = 0
    if len(ends) >= concurrency:
        sent = sum(ends[concurrency - 1] <= record.start_ns < last_sent_ns for record in records)
    if sent < concurrency:
        return NoSteadyPart(
            f"{sent} requests were sent between the end of the first round and the last request, but {concurrency} "
            "are needed",
            f"measure {4 * concurrency} requests or more",
        )
    phases = _cut(records, ends[concurrency - 1], last_sent_ns)
    if phases.mean_in_flight < HELD_SHARE * concurrency:
        return NoSteadyPart(
            f"on average {phases.mean_in_flight:.3g} of {concurrency} requests were in flight",
            mean_in_flight=phases.mean_in_flight,
        )
    return phases


def open_loop_phases(records: Sequence[RequestRecord]) -> Phases | NoSteadyPart:
    """The phases of a load that sends requests at a rate, independent of earlier requests.

    The steady part starts when nine of ten requests sent at the start would have ended: after the 90th percentile of
    the latencies, since a single request may be a straggler. It ends when the last request is sent, and must be longer
    than the ramp. A server that falls behind has no steady part, because its latencies grow with the run.
    """
    if none := _nothing_succeeded(records):
        return none
    first_ns, last_sent_ns = min(record.start_ns for record in records), max(record.start_ns for record in records)
    ramp_ns = _percentile_90_ns([record.end_ns - record.start_ns for record in records if record.succeeded])
    sending_ns = last_sent_ns - first_ns
    if sending_ns <= 2 * ramp_ns:
        return NoSteadyPart(
            f"requests were sent for {sending_ns / 1e9:.3g} s, but nine of ten took up to {ramp_ns / 1e9:.3g} s",
            "send them for more than twice as long as nine of ten take",
        )
    return _cut(records, first_ns + ramp_ns, last_sent_ns)


def sent_in(records: Sequence[RequestRecord], span: Span) -> list[RequestRecord]:
    """The requests that count for latencies and lengths: those sent in the span, wherever they end.

    Counting only requests that also end in the span would bias the sample towards short ones, because a long request is
    more likely to cross the span's end.
    """
    return [record for record in records if span.has(record.start_ns)]


def is_in_flight_within(record: RequestRecord, span: Span) -> bool:
    """Whether the request was in flight at some moment of the span, including its end."""
    return record.start_ns < span.end_ns and record.end_ns >= span.start_ns


def requests_in(record: RequestRecord, span: Span) -> float:
    """The share of a request that was served in the span, by time.

    Counting whole requests by their end would make the result jump by a full round when requests end together.
    """
    return span.share_of(record.start_ns, record.end_ns)


def output_tokens_in(record: RequestRecord, span: Span) -> float:
    """The number of output tokens of one counted request that arrived in the span.

    The first token counts at its arrival; the others are spread evenly from then to the last content. Without a TTFT
    (no streaming), all tokens are spread evenly over the request. For adjacent spans that cover the whole request, the
    results add up to all of its tokens.
    """
    tokens = record.output_sequence_length or 0.0
    last_ns = record.end_ns if record.request_latency is None else _after(record, record.request_latency)
    if record.time_to_first_token is None or tokens < 1:
        return tokens * span.share_of(record.start_ns, last_ns)
    first_ns = _after(record, record.time_to_first_token)
    return span.has(first_ns) + (tokens - 1) * span.share_of(first_ns, last_ns)


def input_tokens_in(record: RequestRecord, span: Span) -> float:
    """The number of input tokens of one counted request that were computed in the span.

    They are spread evenly from the request's start to its first token or, without a TTFT, over the request. Tokens that
    a prefix cache had count like the others.
    """
    tokens, first_ms = record.input_sequence_length or 0.0, record.time_to_first_token
    return tokens * span.share_of(record.start_ns, record.end_ns if first_ms is None else _after(record, first_ms))


def _after(record: RequestRecord, latency_ms: float) -> int:
    """The time ``latency_ms`` after the start, in ns since 1970; an int, because a float of that size is off by up to
    128 ns.
    """
    return record.start_ns + round(latency_ms * 1e6)


def _nothing_succeeded(records: Sequence[RequestRecord]) -> NoSteadyPart | None:
    if any(record.succeeded for record in records):
        return None
    return NoSteadyPart("no request succeeded" if records else "there is no request")


def _filled(records: Sequence[RequestRecord], concurrency: int) -> tuple[int | None, int]:
    """The time at which all slots were first in use (None: never), and the maximum in use until then."""
    ends = sorted(record.end_ns for record in records)
    most = 0
    for sent, start_ns in enumerate(sorted(record.start_ns for record in records), start=1):
        in_flight = sent - bisect_right(ends, start_ns)
        if in_flight >= concurrency:
            return start_ns, in_flight
        most = max(most, in_flight)
    return None, most


def _cut(records: Sequence[RequestRecord], start_ns: int, end_ns: int) -> Phases:
    steady = Span(start_ns, end_ns)
    in_flight_ns = sum(max(0, min(record.end_ns, end_ns) - max(record.start_ns, start_ns)) for record in records)
    return Phases(
        ramp=Span(min(record.start_ns for record in records), start_ns),
        steady=steady,
        drain=Span(end_ns, max(record.end_ns for record in records)),
        sent_count=len(sent_in(records, steady)),
        mean_in_flight=in_flight_ns / (end_ns - start_ns),
    )


def _percentile_90_ns(latencies_ns: Sequence[int]) -> int:
    """Like :func:`trtx.stats.percentiles.percentile`, but exact: in floats, half a nanosecond may round either way."""
    ordered = sorted(latencies_ns)
    whole, rest = divmod((len(ordered) - 1) * 90, 100)
    if rest == 0:
        return ordered[whole]
    return round(Fraction(ordered[whole] * (100 - rest) + ordered[whole + 1] * rest, 100))
