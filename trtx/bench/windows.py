"""Ramp, steady part and drain of one trial, found from the times of its requests. Pure.

What others do, and why this differs. SGLang's bench takes the longest interval above a share of the peak concurrency,
Triton's perf_analyzer repeats windows until their means agree, vLLM's and aiperf 0.13.0 divide by the whole run, and
MLPerf's LoadGen asks for runs so long that the edges vanish. A trial here is short and its load is known, so the
edges are found from the load itself. The first requests, sent at once to an idle server, queue for each other's
prefill: their time to the first token is a start's, not the load's (mlcommons/endpoints #86, modelscope/evalscope
#1641). So the ramp ends not where the concurrency is reached, but where as many requests as that have ended since.

docs/validity.md has the definitions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from trtx.bench.records import RequestRecord

# Of the slots of a closed loop, how many must be in use on average. Below, the load was another one than asked.
HELD_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class Span:
    """A time, its start included and its end not, in ns since 1970."""

    start_ns: int
    end_ns: int

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    def has(self, at_ns: int) -> bool:
        return self.start_ns <= at_ns < self.end_ns

    def share_of(self, start_ns: int, end_ns: int) -> float:
        """Which part of a time lies in this one: 0 to 1. An instant lies in it or not."""
        if end_ns <= start_ns:
            return float(self.has(start_ns))
        return max(0.0, min(end_ns, self.end_ns) - max(start_ns, self.start_ns)) / (end_ns - start_ns)


@dataclass(frozen=True, slots=True)
class Phases:
    """One trial cut in three, with what the steady part holds."""

    ramp: Span
    steady: Span
    drain: Span
    sent_count: int  # requests sent in the steady part: those whose latencies and lengths count
    ended_count: int  # requests that ended in it, failed ones too
    mean_in_flight: float  # requests, over the steady part


@dataclass(frozen=True, slots=True)
class NoSteadyPart:
    """Why a trial has none, in one clause."""

    reason: str
    remedy: str = ""  # what to do, where a longer trial would have one
    mean_in_flight: float | None = None  # where the load's times were found, but it was not held between them


def phases_of(records: Sequence[RequestRecord], concurrency: int | None) -> Phases | NoSteadyPart:
    """Of a trial's requests; ``concurrency`` None: they came at a rate."""
    return open_loop_phases(records) if concurrency is None else closed_loop_phases(records, concurrency)


def closed_loop_phases(records: Sequence[RequestRecord], concurrency: int) -> Phases | NoSteadyPart:
    """Of a load that keeps ``concurrency`` requests in flight.

    Steady: from where, with all slots in use, as many requests as there are slots have succeeded since, until the last
    request is sent; from then on no slot is filled again. At least one request a slot must be sent in it.
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
            f"{sent} requests were sent between the end of the first round and the last request, {concurrency} must be",
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
    """Of a load that sends requests at a rate, whatever became of those before.

    Steady: from where nine of ten requests sent at the start would have ended (the 90th percentile of the latencies, as
    one request's own may be a straggler's), until the last one is sent. It must be as long as the ramp: a server that
    falls behind has latencies that grow with the run, and so none.
    """
    if none := _nothing_succeeded(records):
        return none
    first_ns, last_sent_ns = min(record.start_ns for record in records), max(record.start_ns for record in records)
    ramp_ns = _percentile_90_ns([record.end_ns - record.start_ns for record in records if record.succeeded])
    sending_ns = last_sent_ns - first_ns
    if sending_ns <= 2 * ramp_ns:
        return NoSteadyPart(
            f"requests were sent for {sending_ns / 1e9:.3g} s, and nine of ten took up to {ramp_ns / 1e9:.3g} s",
            "send them for more than twice as long as nine of ten take",
        )
    return _cut(records, first_ns + ramp_ns, last_sent_ns)


def sent_in(records: Sequence[RequestRecord], span: Span) -> list[RequestRecord]:
    """The requests that count for latencies and lengths: sent in the span, wherever they end.

    Those that also end in it would be the short ones, as a long request is more likely to cross the span's end.
    """
    return [record for record in records if span.has(record.start_ns)]


def is_in_flight_within(record: RequestRecord, span: Span) -> bool:
    """At some moment of the span, the one of its end too."""
    return record.start_ns < span.end_ns and record.end_ns >= span.start_ns


def requests_in(record: RequestRecord, span: Span) -> float:
    """How much of one request was served in the span: its share of the request's time.

    Whole ones alone, by their ends, jump by a round where requests end together.
    """
    return span.share_of(record.start_ns, record.end_ns)


def output_tokens_in(record: RequestRecord, span: Span) -> float:
    """Output tokens of one counted request that came in the span.

    The first when it came; the others evenly from then to the last content. Without a first token's time (no stream),
    all of them evenly over the request. Spans that cover a request without overlap have all of its tokens together.
    """
    tokens = record.output_sequence_length or 0.0
    last_ns = record.end_ns if record.request_latency is None else _after(record, record.request_latency)
    if record.time_to_first_token is None or tokens < 1:
        return tokens * span.share_of(record.start_ns, last_ns)
    first_ns = _after(record, record.time_to_first_token)
    return span.has(first_ns) + (tokens - 1) * span.share_of(first_ns, last_ns)


def _after(record: RequestRecord, latency_ms: float) -> int:
    """The time at which a latency had passed, in ns since 1970. Whole, as a float of that size is up to 128 ns off."""
    return record.start_ns + round(latency_ms * 1e6)


def _nothing_succeeded(records: Sequence[RequestRecord]) -> NoSteadyPart | None:
    if any(record.succeeded for record in records):
        return None
    return NoSteadyPart("no request succeeded" if records else "there is no request")


def _filled(records: Sequence[RequestRecord], concurrency: int) -> tuple[int | None, int]:
    """When first all slots were in use, if ever, and the most that were until then."""
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
        ended_count=sum(start_ns < record.end_ns <= end_ns for record in records),
        mean_in_flight=in_flight_ns / (end_ns - start_ns),
    )


def _percentile_90_ns(latencies_ns: Sequence[int]) -> int:
    """As :func:`trtx.stats.percentiles.percentile`, exact: in floats half a nanosecond is rounded either way."""
    ordered = sorted(latencies_ns)
    whole, rest = divmod((len(ordered) - 1) * 90, 100)
    if rest == 0:
        return ordered[whole]
    return round(Fraction(ordered[whole] * (100 - rest) + ordered[whole + 1] * rest, 100))
