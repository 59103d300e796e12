"""The causes of slowness that a cell can show: evidence, threshold and sentence of each, in one table.

A cause is named only if its evidence was recorded and passes its threshold. Where nothing stands out, none is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from trtx.bench.judge.checks import percent
from trtx.bench.judge.server_checks import throttled
from trtx.bench.readings import GpuReading
from trtx.bench.stage_rows import StageRow, WorkerUse
from trtx.bench.stages import DECODE, HANDOFF, QUEUE, STREAM, RequestSplit, SplitPercentile

Bound = Literal["compute", "memory", "host", "queue", "network"]
"""The bottleneck: the GPU's matmuls, its memory bandwidth, the host's cores, waiting requests, or the network."""

LEAST_REQUESTS = 10  # with fewer, one slow request would be a cause
_STANDS_OUT = 0.40  # share of a latency from which a stage stands out
_LEAST_MS = 5.0  # a stage shorter than this is not worth a sentence, whatever its share
_TAIL_SHARE, _TAIL_LEAST = 0.10, 5  # the slowest requests, whose waiting time is examined
_LONG_PROMPT = 4.0  # a prompt this many times as long as one that waits for it
_LEAST_LONG = 256  # computed tokens; a shorter prompt is not long, even if cached ones have 1 token to compute
_LATE_END = 0.1  # delay of an answer's end at a slow client, as a share of the delay of its first content
_OVERLAP = 0.5  # share of the wait during which the long prompt was computed
_HOST_BOUND = 0.30  # the engine waits for its device in less than this share of its time
_FULL_CORE = 0.85  # minimum share of the time in which a worker used its core or waited for it
_OWN_CORE = 0.40  # minimum share of the time in which the worker itself used the core


@dataclass(frozen=True, kw_only=True)
class SlowEvidence:
    """The evidence from which causes are named. None: not recorded; empty: recorded, and there is nothing."""

    splits: tuple[RequestSplit, ...]  # of measured requests
    ttft: SplitPercentile | None = None  # at p50
    itl: SplitPercentile | None = None  # at p50
    gpus: tuple[GpuReading, ...] | None = None
    uses: tuple[WorkerUse, ...] = ()  # over the measured parts

    @property
    def rows(self) -> list[StageRow]:
        return [row for split in self.splits for row in split.rows]


@dataclass(frozen=True, slots=True)
class Shown:
    """A rule's result: the numbers that show the cause, as a clause without a full stop."""

    evidence: str


@dataclass(frozen=True, slots=True)
class SlowCause:
    """One cause of slowness. Its texts appear in docs/reference/causes.md."""

    name: str
    bound: Bound
    needs: str  # the evidence that must have been recorded
    threshold: str
    sentence: str  # what happens
    advice: str  # the next thing to try
    rule: Callable[[SlowEvidence], Shown | None]


_causes: dict[str, SlowCause] = {}


def _cause(
    *, name: str, bound: Bound, needs: str, threshold: str, sentence: str, advice: str
) -> Callable[[Callable[[SlowEvidence], Shown | None]], Callable[[SlowEvidence], Shown | None]]:
    def taken_in(rule: Callable[[SlowEvidence], Shown | None]) -> Callable[[SlowEvidence], Shown | None]:
        _causes[name] = SlowCause(name, bound, needs, threshold, sentence, advice, rule)
        return rule

    return taken_in


def all_causes() -> tuple[SlowCause, ...]:
    """All causes, in the order in which they are looked for: what slows everything else comes first."""
    return tuple(_causes.values())


def causes_in(evidence: SlowEvidence) -> tuple[tuple[SlowCause, str], ...]:
    """The causes that a cell shows, each with its evidence."""
    if len(evidence.splits) < LEAST_REQUESTS:
        return ()
    found = [(cause, shown.evidence) for cause in all_causes() if (shown := cause.rule(evidence)) is not None]
    names = {cause.name for cause, _ in found}
    # Requests behind a long prompt wait in the queue too.
    return tuple((cause, text) for cause, text in found if cause.name != "queue" or "head of line" not in names)


@_cause(
    name="throttled GPU",
    bound="compute",
    needs="GPU readings with clock reasons",
    threshold="the rule of the validity check of the same name",
    sentence="a GPU was slowed down by heat or by its power supply",
    advice="check cooling and power of this machine, and measure again",
)
def _throttled_gpu(evidence: SlowEvidence) -> Shown | None:
    throttling = None if evidence.gpus is None else throttled(evidence.gpus)
    return None if throttling is None else Shown(throttling)


@_cause(
    name="worker on one core",
    bound="host",
    needs="a worker's CPU time, the time that it waited for a core, and the number of cores that it may use",
    threshold=f"a worker may use one core; in half of the readings it used {_OWN_CORE:.0%} of the core or more, and "
    f"used it or waited for it in {_FULL_CORE:.0%} of the time or more",
    sentence="a worker and its engine share one core, which is full",
    advice="give the worker more cores (taskset or a cpuset)",
)
def _one_core(evidence: SlowEvidence) -> Shown | None:
    by_worker: dict[str, list[WorkerUse]] = {}
    for use in sorted(evidence.uses, key=lambda one: one.at_ns):
        by_worker.setdefault(use.worker, []).append(use)
    for worker, uses in by_worker.items():
        if max(use.cores for use in uses) != 1:
            continue
        used, waited = _shares_of_a_core(uses)
        if not used or median(used) < _OWN_CORE:
            continue
        if median(min(1.0, one + other) for one, other in zip(used, waited, strict=True)) >= _FULL_CORE:
            also = f" and waited for it in {percent(median(waited))} of the time" if any(waited) else ""
            return Shown(f"{worker} may use 1 core, used {percent(median(used))} of it{also}")
    return None


def _shares_of_a_core(uses: Sequence[WorkerUse]) -> tuple[list[float], list[float]]:
    """The shares of one core's time, between two readings each, that a worker used it and that it waited for it.

    Waiting that was not counted is 0. Several threads may wait at once, so their share is at most 1.
    """
    used, waited = [], []
    for then, now in pairwise(uses):
        seconds = (now.at_ns - then.at_ns) / 1e9
        used.append((now.cpu_s - then.cpu_s) / seconds)
        known = then.waited_s is not None and now.waited_s is not None
        took = (now.waited_s or 0.0) - (then.waited_s or 0.0) if known else 0.0
        waited.append(min(1.0, max(0.0, took / seconds)))  # negative if a thread ended: its time is lost
    return used, waited


@_cause(
    name="slow client",
    bound="host",
    needs="when a request was due and sent, the stream stage, and when the answer ended on both sides",
    threshold=f"half of the requests were sent late by {_STANDS_OUT:.0%} of TTFT p50 or more; or, without a slow "
    "handoff, stream is that share of ITL p50, or of TTFT p50 if half of the answers also end late, by "
    f"{_LATE_END:.0%} of it; and by at least {_LEAST_MS:g} ms",
    sentence="the client sends requests late or takes answers late",
    advice="give the load generator cores of its own, or run it on another machine",
)
def _slow_client(evidence: SlowEvidence) -> Shown | None:
    gates = [split.gate_ms for split in evidence.splits if split.gate_ms is not None]
    ttft = evidence.ttft
    if gates and ttft is not None and (late := median(gates)) >= max(_LEAST_MS, _STANDS_OUT * ttft.value):
        return Shown(
            f"requests were sent {milliseconds(late)} after they were due; TTFT p50 is {milliseconds(ttft.value)}"
        )
    if _slow_handoff(evidence) is not None:
        return None  # a KV transfer that saturates the network delays answers too
    shown = _part("TTFT", ttft, STREAM)
    if ttft is not None and shown is not None:
        ends = [split.end_late_ms for split in evidence.splits if split.end_late_ms is not None]
        # If only the first content is late, the frontend or the worker held it back, for example because the first
        # token has no text.
        if ends and median(ends) >= max(_LEAST_MS, _LATE_END * ttft.stages[STREAM]):
            return Shown(
                f"{shown.evidence}, and answers end {milliseconds(median(ends))} after their last chunk was sent"
            )
    return _part("ITL", evidence.itl, STREAM)


@_cause(
    name="head of line",
    bound="compute",
    needs="when each prompt was computed on a worker, and its length",
    threshold=f"of the slowest {_TAIL_SHARE:.0%} of the requests with short prompts (at most 1/{_LONG_PROMPT:g} of the "
    f"longest; at least {_TAIL_LEAST} requests), half waited at least {_OVERLAP:.0%} of queue and prefill while the "
    f"same worker computed a prompt {_LONG_PROMPT:g} times as long as theirs, of {_LEAST_LONG} tokens or more",
    sentence="short requests wait while a long prompt is computed",
    advice="lower max_num_tokens or enable chunked prefill, or serve long prompts from workers of their own (--mode "
    "disagg)",
)
def _head_of_line(evidence: SlowEvidence) -> Shown | None:
    prompts = [(row, row.prefill_span_ns) for row in evidence.rows]
    spans = [(row, span) for row, span in prompts if span is not None and (row.computed_tokens or 0) >= _LEAST_LONG]
    longest = max((row.computed_tokens or 0 for row, _ in spans), default=0)
    # Long prompts are slow by themselves, and would fill the tail.
    slow = [split for split in evidence.splits if 0 < _LONG_PROMPT * _computed_tokens(split) <= longest]
    slow.sort(key=lambda split: -(split.record.time_to_first_token or 0.0))
    slow = slow[: max(_TAIL_LEAST, round(_TAIL_SHARE * len(slow)))]
    behind: list[tuple[int, int, float]] = []  # own tokens, tokens of the long prompt, ms of waiting for it
    for split in slow:
        if (found := _waited_for(split, spans)) is not None:
            behind.append(found)
    if len(slow) < _TAIL_LEAST or len(behind) < len(slow) / 2:
        return None
    own, other, beside = (median(values) for values in zip(*behind, strict=True))
    if beside < _LEAST_MS:
        return None
    return Shown(
        f"{len(behind)} of the {len(slow)} slowest requests with short prompts, of {own:.0f} tokens, waited "
        f"{milliseconds(beside)} while a prompt of {other:.0f} tokens was computed"
    )


def _computed_tokens(split: RequestSplit) -> int:
    """Prompt tokens that a worker computed; 0 if unknown."""
    return max((row.computed_tokens or 0 for row in split.rows if row.prefill_span_ns is not None), default=0)


def _waited_for(
    split: RequestSplit, spans: Sequence[tuple[StageRow, tuple[float, float]]]
) -> tuple[int, int, float] | None:
    """The longest prompt that was computed during most of a request's queue and prefill, if it is much longer.

    Returns the request's computed tokens, those of the long prompt, and the ms that the request waited for it.
    """
    own = next((row for row in split.rows if row.prefill_span_ns is not None), None)
    if own is None or own.prefill_span_ns is None or own.submitted_s is None or own.computed_tokens is None:
        return None
    began, ended = own.arrived_ns + own.submitted_s * 1e9, own.prefill_span_ns[1]
    best: tuple[int, int, float] | None = None
    for row, (start, end) in spans:
        tokens, beside = row.computed_tokens or 0, min(end, ended) - max(start, began)
        is_long = row.worker == own.worker and row.id != own.id and tokens >= _LONG_PROMPT * max(1, own.computed_tokens)
        if is_long and beside >= _OVERLAP * (ended - began) and (best is None or beside > best[2] * 1e6):
            best = own.computed_tokens, tokens, beside / 1e6
    return best


@_cause(
    name="queue",
    bound="queue",
    needs="the queue stage",
    threshold=f"queue is {_STANDS_OUT:.0%} of TTFT p50 or more, at least {_LEAST_MS:g} ms and two ITLs",
    sentence="requests wait for a free slot or for KV blocks",
    advice="add workers, raise max_batch_size or the KV pool, or send less at once",
)
def _queue(evidence: SlowEvidence) -> Shown | None:
    step = 0.0 if evidence.itl is None else evidence.itl.value
    if evidence.ttft is None or evidence.ttft.stages.get(QUEUE, 0.0) < 2 * step:
        return None  # a request that arrives during a step waits for its end
    return _part("TTFT", evidence.ttft, QUEUE)


@_cause(
    name="slow handoff",
    bound="network",
    needs="the handoff stage of a prefill and a decode worker",
    threshold=f"half of the reads of KV took {_STANDS_OUT:.0%} of TTFT p50 or of the time after the first token; or, "
    f"where reads are not timed, handoff is {_OVERLAP:.0%} of TTFT p50 or more; and at least {_LEAST_MS:g} ms and two "
    "decode steps",
    sentence="moving KV from the prefill worker to the decode worker takes long",
    advice="check the transport that trtx doctor names, and place the workers on GPUs with NVLink",
)
def _slow_handoff(evidence: SlowEvidence) -> Shown | None:
    ttft, itl = evidence.ttft, evidence.itl
    reads = [1e3 * row.read_s for row in evidence.rows if row.read_s is not None]
    if not reads:
        return _part("TTFT", ttft, HANDOFF) if ttft is not None and ttft.share(HANDOFF) >= _OVERLAP else None
    step = 0.0 if itl is None else itl.stages.get(DECODE, 0.0)
    if (took := median(reads)) < max(_LEAST_MS, 2 * step):
        return None  # an engine begins and ends its reads between two steps
    if itl is not None and itl.share(HANDOFF) >= _STANDS_OUT:
        share = percent(itl.share(HANDOFF))
        return Shown(f"reading the KV took {milliseconds(took)}, {share} of the time after the first token")
    if ttft is not None and took >= _STANDS_OUT * ttft.value:
        text = milliseconds(ttft.value)
        return Shown(f"reading the KV took {milliseconds(took)} after the first token; TTFT p50 is {text}")
    return None


@_cause(
    name="host-bound engine",
    bound="host",
    needs="the time that the engine waited for its device",
    threshold=f"decode steps are {_STANDS_OUT:.0%} of ITL p50 or more, and the engine waited for its device in less "
    f"than {_HOST_BOUND:.0%} of them",
    sentence="the device that computes the model waits for the engine's process on the host",
    advice="enable CUDA graphs and the overlap scheduler, raise the batch, or give the engine a faster core",
)
def _host_bound(evidence: SlowEvidence) -> Shown | None:
    if evidence.itl is None or evidence.itl.share(DECODE) < _STANDS_OUT:
        return None
    waited = device_wait(evidence.rows)
    if waited is None or waited >= _HOST_BOUND:
        return None
    return Shown(
        f"decode steps are {percent(evidence.itl.share(DECODE))} of ITL p50, and the engine waited for its device in "
        f"{percent(waited)} of them"
    )


def device_wait(rows: Sequence[StageRow]) -> float | None:
    """Share of decoding in which the engine waited for its device; None if it was not recorded."""
    known = [row for row in rows if row.decode_s and row.device_wait_s is not None]
    total = sum(row.decode_s or 0.0 for row in known)
    return sum(row.device_wait_s or 0.0 for row in known) / total if total else None


def _part(metric: str, split: SplitPercentile | None, stage: str) -> Shown | None:
    if split is None or split.share(stage) < _STANDS_OUT or split.stages[stage] < _LEAST_MS:
        return None
    return Shown(f"{stage} is {milliseconds(split.stages[stage])} of {metric} p50 {milliseconds(split.value)}")


def milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"
