"""The metrics of a cell, named as in aiperf. Each is defined by one formula in a record with its texts.

All formulas exclude warm-up. Latencies, lengths and tokens come from successful requests. Throughputs are divided by
the time from the start of the first measured request to the end of the last one, failed requests included. A metric
that can't be computed is None, never 0: no request succeeded, or a successful one lacks an input.

Over a span of a trial (``phases.py``), rates count what was served within the span and divide by its length; all other
metrics cover the requests sent within it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from trtx.bench.failures import Reasons, count_reasons
from trtx.bench.metric_types import Extent, Figures, Number, Records, Spread, metric, per_device
from trtx.bench.phases import Span, is_in_flight_within, output_tokens_in, requests_in
from trtx.bench.records import RecordedFormat
from trtx.stats.percentiles import percentile


class Heading(Enum):
    """Column groups of the report page, in page order: throughput before latency, in the order a reader decides."""

    TOKEN_THROUGHPUT = "tokens/s"
    REQUEST_THROUGHPUT = "requests/s"
    IMAGE_THROUGHPUT = "images/s"
    TTFT = "TTFT, ms"
    ITL = "ITL, ms"
    E2E = "E2E, ms"
    LENGTHS = "tokens"
    FORMATS = "answer format, %"
    SPECULATION = "speculation"
    GPUS = "GPUs"
    ENERGY = "J/token"
    COST = "cost/M tokens"
    TIME = "time"


GPU_HEADINGS = (Heading.GPUS, Heading.ENERGY, Heading.COST)  # in a table of their own


@metric(Number[int], title="requests", unit="requests", heading=None, meaning="successful requests")
def request_count(records: Records) -> int:
    return sum(record.succeeded for record in records)


@metric(
    Number[int],
    title="failed",
    unit="requests",
    heading=None,
    meaning="requests without a complete answer: HTTP errors, timeouts, cancellations, no finish reason or [DONE], or "
    "another number of tokens than requested; no other metric includes them",
    better="lower",
)
def error_request_count(records: Records) -> int:
    return len(records) - request_count(records)


@metric(
    Number[int],
    title="uncounted",
    unit="requests",
    heading=None,
    meaning="successful requests whose answer has no usage; metrics that need token counts can't be computed then",
    better="lower",
)
def uncounted_request_count(records: Records) -> int:
    return sum(record.succeeded and not record.is_counted for record in records)


@metric(
    Number[float],
    title="error rate",
    unit="%",
    heading=None,
    meaning="failed requests / all requests × 100; 0 without requests",
    better="lower",
)
def request_error_rate(records: Records) -> float:
    return 100 * error_request_count(records) / len(records) if records else 0.0


def _duration_within(records: Records, span: Span) -> float | None:
    return span.duration_s


@metric(
    Number[float | None],
    title="duration",
    unit="s",
    meaning="first measured request's start to the last one's end, failed ones included; mean over trials",
    heading=Heading.TIME,
    label="s",
    mean_over_trials=True,
    within=_duration_within,
)
def benchmark_duration(records: Records) -> float | None:
    if not records:
        return None
    return (max(record.end_ns for record in records) - min(record.start_ns for record in records)) / 1e9


def _request_throughput_within(records: Records, span: Span) -> float | None:
    served = [record for record in records if record.succeeded and is_in_flight_within(record, span)]
    return sum(requests_in(record, span) for record in served) / span.duration_s if served else None


@metric(
    Number[float | None],
    title="requests/s",
    unit="requests/s",
    meaning="successful requests / duration; mean over trials",
    better="higher",
    heading=Heading.REQUEST_THROUGHPUT,
    label="all",
    mean_over_trials=True,
    within=_request_throughput_within,
)
def request_throughput(records: Records) -> float | None:
    return _rate(request_count(records), records)


def _output_token_throughput_within(records: Records, span: Span) -> float | None:
    served = [record for record in records if record.succeeded and is_in_flight_within(record, span)]
    if not served or not _all_counted(served):
        return None
    return sum(output_tokens_in(record, span) for record in served) / span.duration_s


def _images_per_second_within(records: Records, span: Span) -> float | None:
    served = [record for record in records if record.succeeded and is_in_flight_within(record, span)]
    counts = [record.image_count for record in served]
    if not served or None in counts:
        return None
    shares = (requests_in(record, span) * (record.image_count or 0) for record in served)
    return sum(shares) / span.duration_s


@metric(
    Number[float | None],
    title="images/s",
    unit="images/s",
    meaning="images of successful requests / duration, if each of them has images; mean over trials",
    better="higher",
    heading=Heading.IMAGE_THROUGHPUT,
    label="all",
    markdown=[None],
    of_images=True,
    mean_over_trials=True,
    since=5,
    within=_images_per_second_within,
)
def images_per_second(records: Records) -> float | None:
    counts = [record.image_count for record in records if record.succeeded]
    known = [count for count in counts if count is not None]
    return _rate(sum(known), records) if len(known) == len(counts) else None


@metric(
    Number[float | None],
    title="tokens/s",
    unit="tokens/s",
    meaning="output tokens of successful requests / duration, all users together; mean over trials",
    better="higher",
    heading=Heading.TOKEN_THROUGHPUT,
    label="all",
    table={None: "tok/s"},
    markdown=[None],
    mean_over_trials=True,
    within=_output_token_throughput_within,
)
def output_token_throughput(records: Records) -> float | None:
    return _rate(sum(_values(records, "output_sequence_length")), records) if _all_counted(records) else None


def _paced_request_count(figures: Figures) -> int:
    """Number of requests with an ITL."""
    found = figures[inter_token_latency]
    return 0 if found is None else found.count


@metric(
    Number[float | None],
    title="tokens/s/user",
    unit="tokens/s/user",
    meaning="median over requests of 1 / ITL: how fast one user sees tokens arrive",
    better="higher",
    heading=Heading.TOKEN_THROUGHPUT,
    label="per user",
    statistic="p50",
    of_stream=True,
    samples=_paced_request_count,
    table={None: "/user"},
    markdown=[None],
)
def output_token_throughput_per_user(records: Records) -> float | None:
    # aiperf's p50. The mean would be dominated by the few answers whose tokens arrived almost at once: 1 / ITL is
    # unbounded.
    rates = [1000 / latency for latency in _values(records, "inter_token_latency")]
    return percentile(rates, 50) if rates and _all_counted(records) else None


output_token_throughput_per_device = per_device(
    output_token_throughput,
    title="tokens/s/{device}",
    unit="tokens/s/{device}",
    meaning="tokens/s / all GPUs of the topology, including those for prefill; / all its workers if no GPU is known",
    heading=Heading.TOKEN_THROUGHPUT,
    label="per {device}",
    table={None: "/{device}"},
    markdown=[None],
)


@metric(
    Spread,
    title="TTFT",
    unit="ms",
    meaning="from the request to the first content of its answer",
    better="lower",
    heading=Heading.TTFT,
    of_stream=True,
    table={50: "TTFT", 90: "p90", 99: "p99"},
    markdown=[50, 99],
)
def time_to_first_token(records: Records) -> list[float]:
    return _values(records, "time_to_first_token")


@metric(
    Spread,
    title="ITL",
    unit="ms",
    meaning="(latency − TTFT) / (output tokens − 1), one sample per request; an answer of one token, or in one piece, "
    "has none",
    better="lower",
    heading=Heading.ITL,
    table={50: "ITL"},
    of_stream=True,
    markdown=[50, 99],
)
def inter_token_latency(records: Records) -> list[float]:
    return _values(records, "inter_token_latency") if _all_counted(records) else []


@metric(
    Spread,
    title="E2E",
    unit="ms",
    meaning="from the request to the last content of its answer",
    heading=Heading.E2E,
    better="lower",
)
def request_latency(records: Records) -> list[float]:
    return _values(records, "request_latency")


@metric(
    Number[float | None],
    title="ISL",
    unit="tokens",
    meaning="mean input length as counted by the server, including the tokens of images",
    heading=Heading.LENGTHS,
    label="ISL",
)
def input_sequence_length(records: Records) -> float | None:
    return _mean(_counted(records, "input_sequence_length"))


@metric(
    Number[float | None],
    title="OSL",
    unit="tokens",
    meaning="mean output length as counted by the server",
    heading=Heading.LENGTHS,
    label="OSL",
)
def output_sequence_length(records: Records) -> float | None:
    return _mean(_counted(records, "output_sequence_length"))


@metric(
    Extent,
    title="ISL",
    unit="tokens",
    heading=None,
    meaning="the shortest and the longest prompt as counted by the server",
)
def input_sequence_lengths(records: Records) -> list[float]:
    return _counted(records, "input_sequence_length")


@metric(
    Extent,
    title="OSL",
    unit="tokens",
    heading=None,
    meaning="the shortest and the longest answer as counted by the server",
)
def output_sequence_lengths(records: Records) -> list[float]:
    return _counted(records, "output_sequence_length")


@metric(
    Number[float | None],
    title="requests with a format",
    unit="%",
    meaning="requests that ask for structured output (response_format, guided_json, …) / all requests × 100; "
    "known for loads in which a record or extra_inputs has such a field, or tools",
    heading=Heading.FORMATS,
    label="asked",
    if_known=True,
    since=6,
)
def format_request_rate(records: Records) -> float | None:
    return _share_asking("format", records)


@metric(
    Number[float | None],
    title="requests with tools",
    unit="%",
    meaning="requests that offer tools / all requests × 100; known for loads in which a record or extra_inputs has "
    "tools or asks for structured output",
    heading=Heading.FORMATS,
    label="tools",
    if_known=True,
    since=6,
)
def tools_request_rate(records: Records) -> float | None:
    return _share_asking("tools", records)


@metric(
    Number[float | None],
    title="cut answers",
    unit="%",
    meaning="answers that max_tokens ended inside their document or tool call / answers that had to follow a format × "
    "100; a cut answer is no failed request",
    heading=Heading.FORMATS,
    label="cut",
    if_known=True,
    since=6,
)
def cut_answer_rate(records: Records) -> float | None:
    found = _answer_formats(records)
    bound = [one for one in found or () if one.is_bound]
    return 100 * sum(one.outcome == "cut" for one in bound) / len(bound) if bound else None


def most_common_errors(records: Records) -> Reasons:
    """The reasons for failed requests with their counts, most frequent first."""
    return count_reasons(record.error for record in records if record.error is not None)


def _share_asking(what: str, records: Records) -> float | None:
    """The share of requests, in %, that ask for ``what``."""
    found = _answer_formats(records)
    return 100 * sum(what in one.asked for one in found) / len(found) if found else None


def _answer_formats(records: Records) -> list[RecordedFormat] | None:
    """The requested format and the outcome of every request; None if a record lacks them."""
    known = [record.answer_format for record in records if record.answer_format is not None]
    return known if len(known) == len(records) else None


def _values(records: Records, tag: str) -> list[float]:
    values = (record.value(tag) for record in records if record.succeeded)
    return [value for value in values if value is not None]


def _all_counted(records: Records) -> bool:
    """Whether every successful answer has a usage. Without that, metrics that need tokens are undefined, because the
    counted answers would not be representative.
    """
    return uncounted_request_count(records) == 0


def _counted(records: Records, tag: str) -> list[float]:
    """The lengths of all successful answers; empty if any is unknown."""
    values = _values(records, tag)
    return values if _all_counted(records) and len(values) == request_count(records) else []


def _rate(amount: float, records: Records) -> float | None:
    """``amount`` / duration, in 1/s; None if no request succeeded."""
    duration = benchmark_duration(records)
    return amount / duration if duration and request_count(records) else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
