"""The figures of a cell: one pure function each, named as aiperf names it, over the records of its trials.

Every function leaves out warm-up. Latencies, lengths and tokens come from requests that succeeded; the time that
throughput is divided by runs from the first measured request's start to the last one's end, failed ones included.
A figure is None, never 0, where it can't be computed: no request succeeded, or one that did lacks what it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trtx.bench.failures import Reasons, count_reasons
from trtx.bench.records import RequestRecord
from trtx.bench.statistics import percentile, samples_needed

Records = Sequence[RequestRecord]
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Samples of one metric, pooled over the trials of a cell."""

    count: int
    avg: float
    p50: float
    p90: float
    p99: float

    def supports(self, q: float) -> bool:
        """Whether there are enough samples to state the q-th percentile (see ``samples_needed``)."""
        return self.count >= samples_needed(q)


@dataclass(frozen=True, slots=True)
class Range:
    """The smallest and the largest of what each request has: a mean says nothing of any one of them."""

    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What one cell, or one trial of it, came to. None: it can't be computed from its requests."""

    request_count: int  # requests that succeeded
    error_request_count: int
    uncounted_request_count: int  # of those that succeeded: no usage, so no figure that takes tokens is known
    request_error_rate: float  # %
    benchmark_duration: float | None  # s
    request_throughput: float | None  # requests/s
    output_token_throughput: float | None  # tokens/s
    output_token_throughput_per_user: float | None  # tokens/s/user
    time_to_first_token: Distribution | None  # ms
    inter_token_latency: Distribution | None  # ms
    request_latency: Distribution | None  # ms, end to end
    input_sequence_length: float | None  # tokens, mean
    output_sequence_length: float | None  # tokens, mean
    input_sequence_lengths: Range | None = None  # None as well in the cell of a run from before they were kept
    output_sequence_lengths: Range | None = None


def figures(trials: Sequence[Records]) -> Figures:
    """All figures of a cell: throughput is the mean over trials, what each request has is pooled, counts are summed."""
    pooled = [record for trial in trials for record in trial]
    return Figures(
        request_count=request_count(pooled),
        error_request_count=error_request_count(pooled),
        uncounted_request_count=uncounted_request_count(pooled),
        request_error_rate=request_error_rate(pooled),
        benchmark_duration=_mean_over(trials, benchmark_duration),
        request_throughput=_mean_over(trials, request_throughput),
        output_token_throughput=_mean_over(trials, output_token_throughput),
        output_token_throughput_per_user=output_token_throughput_per_user(pooled),
        time_to_first_token=time_to_first_token(pooled),
        inter_token_latency=inter_token_latency(pooled),
        request_latency=request_latency(pooled),
        input_sequence_length=input_sequence_length(pooled),
        output_sequence_length=output_sequence_length(pooled),
        input_sequence_lengths=input_sequence_lengths(pooled),
        output_sequence_lengths=output_sequence_lengths(pooled),
    )


def request_count(records: Records) -> int:
    """Requests that succeeded."""
    return sum(record.succeeded for record in records)


def error_request_count(records: Records) -> int:
    """Requests that failed: HTTP errors, timeouts, cancelled ones, and whatever answer was not whole."""
    return len(records) - request_count(records)


def uncounted_request_count(records: Records) -> int:
    """Requests that succeeded, but whose answer has no usage."""
    return sum(record.succeeded and not record.is_counted for record in records)


def request_error_rate(records: Records) -> float:
    """Failed requests / all requests × 100, in %. 0 when there was none."""
    return 100 * error_request_count(records) / len(records) if records else 0.0


def benchmark_duration(records: Records) -> float | None:
    """(last end − first start) / 10⁹, in s, over all requests, failed ones too."""
    if not records:
        return None
    return (max(record.end_ns for record in records) - min(record.start_ns for record in records)) / 1e9


def request_throughput(records: Records) -> float | None:
    """Requests that succeeded / duration, in requests/s."""
    return _rate(request_count(records), records)


def output_token_throughput(records: Records) -> float | None:
    """Output tokens of requests that succeeded / duration, in tokens/s, all users together."""
    return _rate(sum(_values(records, "output_sequence_length")), records) if _all_counted(records) else None


def output_token_throughput_per_user(records: Records) -> float | None:
    """Median over requests of 1000 / ITL in ms, in tokens/s/user: how fast one user sees tokens arrive.

    aiperf's p50. Its mean is ruled by the few answers whose tokens came nearly at once: 1 / ITL has no upper end.
    """
    rates = [1000 / latency for latency in _values(records, "inter_token_latency")]
    return percentile(rates, 50) if rates and _all_counted(records) else None


def output_token_throughput_per_device(throughput: float | None, device_count: int) -> float | None:
    """Tokens/s / devices of the topology: its GPUs, prefill's too, or its workers where there is no GPU."""
    return None if throughput is None or device_count == 0 else throughput / device_count


def time_to_first_token(records: Records) -> Distribution | None:
    """TTFT: request sent → first content, in ms."""
    return _distribution(_values(records, "time_to_first_token"))


def inter_token_latency(records: Records) -> Distribution | None:
    """ITL of one request: (latency − TTFT) / (output tokens − 1), in ms; one sample a request.

    An answer of one token, or that came in one piece, gives none.
    """
    return _distribution(_values(records, "inter_token_latency")) if _all_counted(records) else None


def request_latency(records: Records) -> Distribution | None:
    """Request sent → last content, in ms: end to end."""
    return _distribution(_values(records, "request_latency"))


def input_sequence_length(records: Records) -> float | None:
    """ISL as the server counted it, mean, in tokens. None where one answer that succeeded does not say it."""
    return _mean(_values(records, "input_sequence_length")) if _all_have(records, "input_sequence_length") else None


def output_sequence_length(records: Records) -> float | None:
    """OSL as the server counted it, mean, in tokens."""
    return _mean(_values(records, "output_sequence_length")) if _all_counted(records) else None


def input_sequence_lengths(records: Records) -> Range | None:
    """The shortest and the longest prompt as the server counted them, in tokens."""
    return _range(records, "input_sequence_length")


def output_sequence_lengths(records: Records) -> Range | None:
    """The shortest and the longest answer as the server counted them, in tokens."""
    return _range(records, "output_sequence_length")


def most_common_errors(records: Records) -> Reasons:
    """Why requests failed, with how often, most frequent first."""
    return count_reasons(record.error for record in records if record.error is not None)


def _values(records: Records, tag: str) -> list[float]:
    values = (getattr(record, tag) for record in records if record.succeeded)
    return [value for value in values if value is not None]


def _all_counted(records: Records) -> bool:
    """A part of the answers can't stand for all: one without usage takes every figure that needs tokens with it."""
    return uncounted_request_count(records) == 0


def _all_have(records: Records, tag: str) -> bool:
    return _all_counted(records) and len(_values(records, tag)) == request_count(records)


def _range(records: Records, tag: str) -> Range | None:
    values = _values(records, tag)
    return Range(min(values), max(values)) if values and _all_have(records, tag) else None


def _rate(amount: float, records: Records) -> float | None:
    """``amount`` / duration, in 1/s; None where no request succeeded."""
    duration = benchmark_duration(records)
    return amount / duration if duration and request_count(records) else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _mean_over(trials: Sequence[Records], figure: Callable[[Records], float | None]) -> float | None:
    """None where one trial has none: the others alone would be the better half."""
    values = [figure(trial) for trial in trials]
    known = [value for value in values if value is not None]
    return _mean(known) if len(known) == len(values) else None


def _distribution(samples: Sequence[float]) -> Distribution | None:
    if not samples:
        return None
    p50, p90, p99 = (percentile(samples, q) for q in PERCENTILES)
    return Distribution(len(samples), sum(samples) / len(samples), p50, p90, p99)
