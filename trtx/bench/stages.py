"""Splits the client's TTFT and ITL of a request into stages, by the rows that workers wrote about it. Pure.

The client's times and a worker's arrival time are compared, so both must come from the same machine's clock. A split
is None if the time of a stage that the request must have passed is unknown. The part of the client's time that no stage
covers is :data:`UNACCOUNTED`, for example messages to and from an engine with another clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trtx.bench.records import RequestRecord
from trtx.bench.stage_rows import StageRow
from trtx.stats.percentiles import percentile

FRONTEND, QUEUE, MEDIA, PREFILL = "frontend", "queue", "media", "prefill"
HANDOFF, FIRST_STEP, DECODE, STREAM = "handoff", "first step", "decode steps", "stream"
UNACCOUNTED = "unaccounted"
STAGES: Mapping[str, str] = {
    FRONTEND: "from the client's request until the engine has it: HTTP, prompt, routing, checks",
    QUEUE: "from then until the engine computes it: the current step's end, a free slot, KV blocks",
    MEDIA: "fetching, preparing and encoding images",
    PREFILL: "from the queue's end to the first token: the prompt's computation",
    HANDOFF: "until the decode worker has passed on the token of the prefill worker; in ITL: reading the KV",
    FIRST_STEP: "from the arrival of the KV to the first token that the decode worker computes",
    DECODE: "computing the tokens after the first",
    STREAM: "from the engine's token to the client: worker, frontend, network",
    UNACCOUNTED: "the rest of the client's time",
}
"""Every stage in the order of a request, with its meaning. The client's own wait before it sends is not in TTFT."""
# Clocks of two processes are read a little apart, so a difference may come out below 0 by this much.
_SKEW_MS = 1.0
_NEAR_SHARE, _NEAR_LEAST = 0.05, 3  # requests around a percentile whose stages are averaged


@dataclass(frozen=True, slots=True)
class RequestSplit:
    """One request: its stages in ms. ITL's are per token."""

    record: RequestRecord
    rows: tuple[StageRow, ...]
    gate_ms: float | None  # from when it was due until the client sent it; None: the client has no such moment
    ttft: Mapping[str, float] | None
    itl: Mapping[str, float] | None

    @property
    def end_late_ms(self) -> float | None:
        """From the worker's last chunk until the client had the end of the answer."""
        last = _workers(self.rows)[1]
        if last is None or last.last_chunk_s is None:
            return None
        return (self.record.end_ns - last.arrived_ns) / 1e6 - 1e3 * last.last_chunk_s


@dataclass(frozen=True, slots=True)
class SplitPercentile:
    """The stages of one percentile in ms, which add up to ``value``: the mean of the requests nearest to it."""

    percentile: int
    value: float
    stages: Mapping[str, float]
    requests: int  # number of requests averaged

    @property
    def largest(self) -> str:
        return max(self.stages, key=lambda stage: self.stages[stage])

    def share(self, stage: str) -> float:
        return self.stages.get(stage, 0.0) / self.value if self.value else 0.0


def split_requests(records: Iterable[RequestRecord], rows: Iterable[StageRow]) -> list[RequestSplit]:
    """Splits each successful request that has rows."""
    by_id: dict[str, list[StageRow]] = defaultdict(list)
    for row in rows:
        by_id[row.id].append(row)
    return [
        split_request(record, by_id[record.request_id])
        for record in records
        if record.succeeded and record.request_id in by_id
    ]


def split_request(record: RequestRecord, rows: Sequence[StageRow]) -> RequestSplit:
    """Splits the time of one request into its stages. ``rows``: what the workers wrote about it."""
    first, last = _workers(rows)
    gate = None if record.credit_issued_ns is None else max(0.0, (record.start_ns - record.credit_issued_ns) / 1e6)
    if first is None or last is None:
        return RequestSplit(record, tuple(rows), gate, None, None)
    return RequestSplit(record, tuple(rows), gate, _ttft(record, first, last), _itl(record, first, last))


def at_percentile(splits: Sequence[tuple[float, Mapping[str, float]]], q: int) -> SplitPercentile | None:
    """The stages at a percentile of values in ms, each given with its stages; None without any."""
    if not splits:
        return None
    value = percentile([one for one, _ in splits], q)
    count = min(len(splits), max(_NEAR_LEAST, round(_NEAR_SHARE * len(splits))))
    nearest = sorted(splits, key=lambda one: abs(one[0] - value))[:count]
    total = sum(one for one, _ in nearest)
    names = [stage for stage in STAGES if any(stage in stages for _, stages in nearest)]
    scale = value / total if total else 0.0
    sums = {stage: scale * sum(stages.get(stage, 0.0) for _, stages in nearest) for stage in names}
    return SplitPercentile(q, value, sums, count)


def _workers(rows: Sequence[StageRow]) -> tuple[StageRow | None, StageRow | None]:
    """The worker that computed the prompt, and the one that streamed; None if a request migrated or a row is lost."""
    by_role: dict[str, list[StageRow]] = defaultdict(list)
    for row in rows:
        by_role[row.role].append(row)
    if any(len(found) > 1 for found in by_role.values()):
        return None, None
    if "agg" in by_role:
        return by_role["agg"][0], by_role["agg"][0]
    if "prefill" in by_role and "decode" in by_role:
        return by_role["prefill"][0], by_role["decode"][0]
    return None, None


def _ttft(record: RequestRecord, first: StageRow, last: StageRow) -> dict[str, float] | None:
    total = record.time_to_first_token
    if total is None or first.submitted_s is None or last.first_chunk_s is None:
        return None
    if first.queue_s is None or first.prefill_s is None:
        return None
    media_s = first.media_s or 0.0
    stages = {
        FRONTEND: (first.arrived_ns - record.start_ns) / 1e6 + 1e3 * (first.submitted_s - media_s),
        QUEUE: 1e3 * first.queue_s,
        PREFILL: 1e3 * first.prefill_s,
    }
    if first.media_s is not None:
        stages[MEDIA] = 1e3 * media_s
    passed_on = first.answered_s
    if passed_on is None:
        return None
    if last is not first:  # decode passes on the token that prefill computed
        between = (last.arrived_ns - first.arrived_ns) / 1e6 + 1e3 * (last.first_chunk_s - passed_on)
        # An engine may pass on prefill's token before it admits the request; only the queue before it counts.
        waited_s = min(last.queue_s or 0.0, max(0.0, last.first_chunk_s - (last.submitted_s or 0.0)))
        stages[QUEUE] += 1e3 * waited_s
        stages[HANDOFF] = between - 1e3 * waited_s
        passed_on = last.first_chunk_s
    stages[STREAM] = total - ((last.arrived_ns - record.start_ns) / 1e6 + 1e3 * passed_on)
    return _complete(stages, total)


def _itl(record: RequestRecord, first: StageRow, last: StageRow) -> dict[str, float] | None:
    """The stages between the first and the last content, per token."""
    itl, tokens = record.inter_token_latency, record.output_sequence_length
    if itl is None or tokens is None or tokens < 2 or last.first_chunk_s is None or last.last_chunk_s is None:
        return None
    gaps = tokens - 1
    known = {DECODE: last.decode_s}
    if last is not first:
        # Decode passes on the first token, which prefill computed, before it reads the KV.
        known = {HANDOFF: last.read_s, FIRST_STEP: last.first_step_s, PREFILL: last.prefill_s, DECODE: last.decode_s}
    stages = {stage: 1e3 * seconds / gaps for stage, seconds in known.items() if seconds is not None}
    if not stages:
        return None
    in_worker = 1e3 * (last.last_chunk_s - last.first_chunk_s) / gaps
    # Chunks that wait for a frontend or a client delay the worker's next ones, unless the engine was slower anyway.
    held = 1e3 * ((last.held_s or 0.0) + (last.rested_s or 0.0)) / gaps
    stages[STREAM] = max(0.0, itl - in_worker) + max(0.0, min(held, in_worker - sum(stages.values())))
    return _complete(_seen(stages, itl), itl)


def _seen(stages: dict[str, float], total: float) -> dict[str, float]:
    """Removes the time that passed before the client had the first token: TTFT contains it, as part of its stream."""
    hidden = max(0.0, sum(stages.values()) - total)
    kept = {}
    for stage, value in stages.items():  # in the order of a request
        kept[stage] = max(0.0, value - hidden)
        hidden = max(0.0, hidden - value)
    return kept


def _complete(stages: dict[str, float], total: float) -> dict[str, float] | None:
    """Adds the unaccounted rest of ``total``, in ms; None if the clocks contradict each other."""
    if any(value < -_SKEW_MS for value in stages.values()):
        return None
    stages = {stage: max(0.0, value) for stage, value in stages.items()}
    return {**stages, UNACCOUNTED: max(0.0, total - sum(stages.values()))}
