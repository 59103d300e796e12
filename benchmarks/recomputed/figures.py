"""The figures of docs/reference/metrics.md and the windows of docs/validity.md a second time.

Times are whole ns and sums are exact, so that what differs from trtx's is no rounding of ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from recomputed.drafts import DRAFTS, RECORDED, Counts, counted, draft_values, recorded
from recomputed.gpus import MEANS, PEAKS, Gpus, Values, gpu_values, over_trials

SAMPLES_NEEDED = {50: 11, 90: 64, 95: 130, 99: 662}  # by percentile; docs/reference/metrics.md
HELD_SHARE = Fraction(3, 4)  # of a closed loop's slots, on average; docs/validity.md
PER_DEVICE = {  # by the metric that is divided by the number of devices
    "output_token_throughput_per_device": "output_token_throughput",
    "gpu_power_per_device": "gpu_power",
}


@dataclass(frozen=True)
class Number:
    """A metric that is one number."""

    title: str = ""  # of its column in summary.md
    has_interval: bool = False  # in the summaries
    median_of: str = ""  # the latency whose samples it is a median of
    of_images: bool = False  # it has a column and an interval only if requests have images
    if_known: bool = False  # it has an interval only if a cell has a value


# The percentiles that every latency has had since version 4 of cell.json.
PERCENTILES = dict.fromkeys((50, 90, 95, 99), 4)


@dataclass(frozen=True)
class Latency:
    """A metric that is a distribution over requests. aiperf records it under the same name, in ms."""

    title: str  # of its columns in summary.md
    percentiles: Mapping[int, int] = field(default_factory=lambda: PERCENTILES)  # with the first version of cell.json

    def __post_init__(self) -> None:
        if lacking := self.percentiles.keys() - SAMPLES_NEEDED.keys():
            raise ValueError(
                f"SAMPLES_NEEDED of benchmarks/recomputed/figures.py lacks the percentiles {sorted(lacking)} of "
                f"{self.title}; add how many samples each needs"
            )


# All metrics of one number, as in the summaries. cell_figures computes them.
NUMBERS = {
    "request_count": Number(),
    "error_request_count": Number(),
    "uncounted_request_count": Number(),
    "request_error_rate": Number(),
    "benchmark_duration": Number(),
    "request_throughput": Number(has_interval=True),
    "images_per_second": Number("images/s", has_interval=True, of_images=True),
    "output_token_throughput": Number("tokens/s", has_interval=True),
    "output_token_throughput_per_user": Number("tokens/s/user", has_interval=True, median_of="inter_token_latency"),
    "output_token_throughput_per_device": Number("tokens/s/{device}", has_interval=True),
    "input_sequence_length": Number(),
    "output_sequence_length": Number(),
    "format_request_rate": Number(),
    "tools_request_rate": Number(),
    "cut_answer_rate": Number(),
    **dict.fromkeys((*MEANS, *PEAKS, "gpu_power_per_device"), Number(has_interval=True, if_known=True)),
    DRAFTS[0]: Number("acceptance length", has_interval=True, if_known=True),
    DRAFTS[1]: Number("acceptance rate", has_interval=True, if_known=True),
    **dict.fromkeys(DRAFTS[2:], Number(has_interval=True, if_known=True)),
}
LATENCIES = {
    "time_to_first_token": Latency("TTFT"),
    "inter_token_latency": Latency("ITL"),
    "request_latency": Latency("E2E"),
}
# The first version of cell.json with the metric, if it was added after version 4.
SINCE = {
    "images_per_second": 5, "format_request_rate": 6, "tools_request_rate": 6, "cut_answer_rate": 6,
    **dict.fromkeys((*MEANS, *PEAKS), 7), **dict.fromkeys(DRAFTS, 8),
}  # fmt: skip
LENGTHS = ("input_sequence_length", "output_sequence_length")
RATES = (
    "benchmark_duration",
    "request_throughput",
    "output_token_throughput",
    "images_per_second",
)  # a mean over trials

Span = tuple[int, int]  # ns since 1970, its end not included
Figures = dict[str, Any]  # in the form of cell.json


@dataclass(frozen=True)
class Request:
    """One measured request, as aiperf recorded it."""

    start: int  # ns since 1970
    end: int
    failed: bool
    values: dict[str, float]  # by aiperf's name of the metric; ms and tokens
    form: dict[str, Any] | None = None  # what it asked of the form of its answer, and the outcome

    def after(self, metric: str) -> int | None:
        """The time, in ns since 1970, at which a latency had passed."""
        return self.start + round(Fraction(self.values[metric]) * 1_000_000) if metric in self.values else None


def read_requests(records: Path) -> list[Request]:
    """The measured ones of one trial, failed ones too. ValueError where a line is not JSON."""
    found = []
    for line in records.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        about, metrics = record["metadata"], record.get("metrics") or {}
        if about["benchmark_phase"] != "profiling":
            continue
        wanted = (*LATENCIES, *LENGTHS, "num_images", *RECORDED.values())
        values = {name: metrics[name]["value"] for name in wanted if name in metrics}
        if values.get("inter_token_latency") == 0:  # the answer came in one piece: there is none
            del values["inter_token_latency"]
        failed = record.get("error") is not None or bool(about.get("was_cancelled"))
        found.append(
            Request(about["request_start_ns"], about["request_end_ns"], failed, values, about.get("trtx_answer_format"))
        )
    return found


def percentile(samples: Sequence[float], q: int) -> float:
    """Linear between the two samples next to position (n − 1) · q / 100, counted from 0."""
    ordered = sorted(samples)
    whole, rest = divmod((len(ordered) - 1) * q, 100)
    if rest == 0:
        return ordered[whole]
    low, high = Fraction(ordered[whole]), Fraction(ordered[whole + 1])
    return float(low + (high - low) * Fraction(rest, 100))


def mean(values: Sequence[float]) -> float:
    return float(sum(map(Fraction, values)) / len(values))


def cell_figures(
    trials: Sequence[Sequence[Request]], gpus: Sequence[Gpus], spans: Sequence[Span] | None = None
) -> Figures:
    """Over all measured requests of each trial, or over one span of each."""
    windows = list(trials)
    if spans is not None:
        windows = [[r for r in trial if a <= r.start < b] for trial, (a, b) in zip(trials, spans, strict=True)]
    requests = [request for window in windows for request in window]
    good = [request for request in requests if not request.failed]
    uncounted = sum("output_sequence_length" not in request.values for request in good)

    def values(name: str) -> list[float]:
        return [request.values[name] for request in good if name in request.values]

    figures: Figures = {
        "request_count": len(good),
        "error_request_count": len(requests) - len(good),
        "uncounted_request_count": uncounted,
        "request_error_rate": 100 * (len(requests) - len(good)) / len(requests) if requests else 0.0,
    }
    rates = [_rates(trial, None if spans is None else spans[number]) for number, trial in enumerate(trials)]
    for name, of_trials in zip(RATES, zip(*rates, strict=True), strict=True):
        figures[name] = None if None in of_trials else mean([value for value in of_trials if value is not None])
    itl = values("inter_token_latency") if not uncounted else []
    figures["output_token_throughput_per_user"] = percentile([1000 / one for one in itl], 50) if itl else None
    for name, latency in LATENCIES.items():
        samples = itl if name == "inter_token_latency" else values(name)
        at = {f"p{q}": percentile(samples, q) for q in latency.percentiles} if samples else {}
        figures[name] = {"count": len(samples), "avg": mean(samples), **at} if samples else None
    for name in LENGTHS:
        lengths = values(name)
        known = bool(lengths) and not uncounted and len(lengths) == len(good)
        figures[name] = mean(lengths) if known else None
        figures[f"{name}s"] = {"min": min(lengths), "max": max(lengths)} if known else None
    asked = [request.form["asked"] for request in requests if request.form is not None]
    known = bool(asked) and len(asked) == len(requests)
    for name, what in (("format_request_rate", "format"), ("tools_request_rate", "tools")):
        figures[name] = 100 * sum(what in one for one in asked) / len(asked) if known else None
    outcomes = [request.form.get("outcome") for request in requests if request.form is not None]
    bound = [outcome for outcome in outcomes if outcome not in (None, "free")]
    figures["cut_answer_rate"] = 100 * bound.count("cut") / len(bound) if bound and known else None
    of_gpus = [
        _of_gpus(trial, one, None if spans is None else spans[number])
        for number, (trial, one) in enumerate(zip(trials, gpus, strict=True))
    ]
    of_drafts = [
        _of_drafts(trial, one, None if spans is None else spans[number])
        for number, (trial, one) in enumerate(zip(trials, gpus, strict=True))
    ]
    return figures | over_trials(of_gpus) | draft_values(of_drafts)


def _of_drafts(trial: Sequence[Request], gpus: Gpus, span: Span | None) -> Counts | None:
    sent = [request for request in trial if not request.failed]
    if span is None:
        span = min(request.start for request in trial), max(request.end for request in trial)
    else:
        sent = [request for request in sent if span[0] <= request.start < span[1]]
    return counted(gpus.every, span) or recorded([request.values for request in sent])


def _of_gpus(trial: Sequence[Request], gpus: Gpus, span: Span | None) -> Values:
    served = [request for request in trial if not request.failed]
    if span is None:
        span = min(request.start for request in trial), max(request.end for request in trial)
        tokens = [[Fraction(r.values[name]) if name in r.values else None for r in served] for name in LENGTHS]
    else:
        served = [request for request in served if request.start < span[1] and request.end >= span[0]]
        each = [[_prompt_tokens(r, span), _tokens(r, span)] for r in served]
        tokens = [
            [one[place] if name in r.values else None for r, one in zip(served, each, strict=True)]
            for place, name in enumerate(LENGTHS)
        ]
    sums = [
        sum((one for one in of if one is not None), Fraction(0)) if of and None not in of else None for of in tokens
    ]
    return gpu_values(gpus, span, *sums)


def _prompt_tokens(request: Request, span: Span) -> Fraction:
    """Evenly from the start to the first token; without a stream, to the end."""
    first = request.after("time_to_first_token")
    share = _share(request.start, request.end if first is None else first, span)
    return Fraction(request.values.get("input_sequence_length", 0)) * share


def goodput(trial: Sequence[Request], bounds: dict[str, Callable[[float], bool]]) -> float | None:
    """Of one trial, in requests/s: requests with every latency of ``bounds``, each within its own. None where one that
    has no usage may be such."""
    for request in trial:
        known = [holds(request.values[name]) for name, holds in bounds.items() if name in request.values]
        is_uncounted = not request.failed and "output_sequence_length" not in request.values
        if is_uncounted and all(known) and len(known) < len(bounds):
            return None
    good = sum(
        not request.failed
        and all(name in request.values and holds(request.values[name]) for name, holds in bounds.items())
        for request in trial
    )
    duration = _rates(trial, None)[0]
    return good / duration if duration else None


def _rates(trial: Sequence[Request], span: Span | None) -> tuple[float | None, ...]:
    """Seconds, requests/s, output tokens/s, images/s: of a whole trial, or of what came in a span of it."""
    served = [request for request in trial if not request.failed]
    if span is None:
        if not trial:
            return None, None, None, None
        span = min(request.start for request in trial), max(request.end for request in trial)
        shares = [Fraction(1)] * len(served)
        tokens = [Fraction(r.values.get("output_sequence_length", 0)) for r in served]
    else:
        served = [request for request in served if request.start < span[1] and request.end >= span[0]]
        shares = [_share(request.start, request.end, span) for request in served]
        tokens = [_tokens(request, span) for request in served]
    seconds = Fraction(span[1] - span[0], 1_000_000_000)
    if not served or not seconds:
        return float(seconds), None, None, None
    counted = all("output_sequence_length" in request.values for request in served)
    seen = all("num_images" in request.values for request in served)
    images = [share * Fraction(r.values.get("num_images", 0)) for share, r in zip(shares, served, strict=True)]
    return (
        float(seconds),
        float(sum(shares) / seconds),
        float(sum(tokens) / seconds) if counted else None,
        float(sum(images) / seconds) if seen else None,
    )


def _share(start: int, end: int, span: Span) -> Fraction:
    """Of a time, the part that lies in the span."""
    if end <= start:
        return Fraction(span[0] <= start < span[1])
    return Fraction(max(0, min(end, span[1]) - max(start, span[0])), end - start)


def _tokens(request: Request, span: Span) -> Fraction:
    """The first when it came, the others evenly until the last content; without a stream, all evenly."""
    tokens = Fraction(request.values.get("output_sequence_length", 0))
    first, last = request.after("time_to_first_token"), request.after("request_latency")
    last = request.end if last is None else last
    if first is None or tokens < 1:
        return tokens * _share(request.start, last, span)
    return Fraction(span[0] <= first < span[1]) + (tokens - 1) * _share(first, last, span)


def steady_span(trial: Sequence[Request], concurrency: int | None) -> Span | None:
    """The steady part of a trial, None where it has none; ``concurrency`` None: requests came at a rate."""
    served = [request for request in trial if not request.failed]
    if not served:
        return None
    last_sent = max(request.start for request in trial)
    if concurrency is None:
        first_sent = min(request.start for request in trial)
        ramp = round(Fraction(percentile([request.end - request.start for request in served], 90)))
        return (first_sent + ramp, last_sent) if last_sent - first_sent > 2 * ramp else None
    full = _first_time_full(trial, concurrency)
    ends = sorted(request.end for request in served if full is not None and request.end > full)
    if len(ends) < concurrency:
        return None
    begin = ends[concurrency - 1]
    if sum(begin <= request.start < last_sent for request in trial) < concurrency:
        return None
    busy = sum(max(0, min(request.end, last_sent) - max(request.start, begin)) for request in trial)
    return (begin, last_sent) if Fraction(busy, last_sent - begin) >= HELD_SHARE * concurrency else None


def _first_time_full(trial: Sequence[Request], concurrency: int) -> int | None:
    # At one moment a slot is left before it is taken.
    changes = sorted([(request.end, -1) for request in trial] + [(request.start, 1) for request in trial])
    in_flight = 0
    for at, change in changes:
        in_flight += change
        if in_flight >= concurrency:
            return at
    return None
