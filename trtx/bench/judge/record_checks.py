"""Validity checks of a cell that need only aiperf's records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from trtx.bench.judge.checks import (
    CLIENT_INVALID,
    CLIENT_SUSPECT,
    Found,
    NotObserved,
    ValidityLevel,
    check,
    client_share,
    percent,
)
from trtx.bench.judge.evidence import AskedLength, Evidence
from trtx.bench.judge.steadiness import Steadiness, SteadinessResult, judge_trend, judge_warm_up, warm_up_needed
from trtx.bench.named_models import other_models
from trtx.bench.windows import NoSteadyPart
from trtx.stats.percentiles import samples_needed

_WRONG_SHARE = 0.10  # of lengths and prefix hits: beyond it, the measured load is not the requested one
_OUTPUT_SHARE, _INPUT_SHARE = 0.01, 0.02
_INPUT_TOKENS = 2  # tokens of a chat template that aiperf and a server may count differently
_HIT_SHARE = 0.02
# Share of an answer's time after its last text, by which its measured latency is too short.
_SILENT_SHARE, _SILENT_INVALID = 0.10, 0.25
_SILENT_TOKENS = 2  # the end token has no text and takes one step
_ONE_PIECE_SHARE = 0.10
# Delay that a busy client adds between two events; 3 to 12 ms were observed with ten busy processes per core.
_SILENT_MS = 10.0


@check(
    name="samples",
    suspect="fewer requests succeeded (in the steady part, where there is one) than the percentiles need that are "
    "concluded from: 11 for p50, 64 for p90, 662 for p99",
    invalid="no request succeeded",
    why="below, a percentile is the maximum under another name",
)
def _samples(evidence: Evidence) -> Found | NotObserved | None:
    if not evidence.answered:
        return Found(ValidityLevel.INVALID, "no request succeeded")
    has_steady = not any(isinstance(phases, NoSteadyPart) for phases in evidence.phases)
    held = [record for records in evidence.steady for record in records if record.succeeded]
    count, where = (len(held), " in the steady part") if has_steady else (len(evidence.answered), "")
    short = [f"p{q} takes {samples_needed(q)}" for q in evidence.percentiles if count < samples_needed(q)]
    return Found(ValidityLevel.SUSPECT, f"{count} requests succeeded{where}, {', '.join(short)}") if short else None


@check(
    name="model",
    suspect="answers name another model than was asked",
    invalid="they name several",
    why="an alias may stand for another name, which no client can tell from another model; an answer without a name "
    "proves nothing",
)
def _model(evidence: Evidence) -> Found | NotObserved | None:
    named = [record.models for record in evidence.answered if record.models]
    if not named or evidence.model is None:
        return NotObserved("no answer names its model")
    if (others := other_models(evidence.model, named)) is None:
        return None
    return Found(ValidityLevel.INVALID if others.are_several else ValidityLevel.SUSPECT, others.sentence)


@check(
    name="output length",
    suspect=f"the mean of the complete answers is more than {_OUTPUT_SHARE:.0%} off",
    invalid=f"more than {_WRONG_SHARE:.0%} off",
    why="latency and tokens/s follow the length; where lengths are drawn, three standard errors are allowed",
)
def _output_length(evidence: Evidence) -> Found | NotObserved | None:
    found = [record.output_sequence_length for record in evidence.answered]
    return _length("output", found, evidence.output_length, _OUTPUT_SHARE, 0)


@check(
    name="input length",
    suspect=f"the mean is more than {_INPUT_SHARE:.0%} and {_INPUT_TOKENS} tokens off",
    invalid=f"more than {_WRONG_SHARE:.0%} and {_INPUT_TOKENS} tokens off",
    why="TTFT follows the length; servers count a chat template's tokens differently, up to 16 of a system message; "
    "drawn lengths as above; what images expand to is the model's, so beside them nobody can tell",
)
def _input_length(evidence: Evidence) -> Found | NotObserved | None:
    if evidence.has_images and evidence.input_length is not None:
        return NotObserved("the load asks for a length of text, and usage counts its images' tokens with it")
    found = [record.input_sequence_length for record in evidence.answered]
    return _length("input", found, evidence.input_length, _INPUT_SHARE, _INPUT_TOKENS)


@check(
    name="silent end",
    suspect=f"half of the answers go on for more than {_SILENT_SHARE:.0%} of their time, {_SILENT_TOKENS} tokens' "
    f"time and {_SILENT_MS:g} ms after their last text",
    invalid=f"more than {_SILENT_INVALID:.0%}",
    why="tokens that have no text (special ones, what a server holds back, or counts and never sends) are in the "
    "tokens/s and in no latency",
)
def _silent_end(evidence: Evidence) -> Found | NotObserved | None:
    spans = [
        ((record.end_ns - record.start_ns) / 1e6, record.request_latency, record.inter_token_latency)
        for record in evidence.answered
        if record.request_latency is not None and record.end_ns > record.start_ns
    ]
    if not spans:
        return None
    silent_ms = median(span - latency for span, latency, _ in spans)
    share = median((span - latency) / span for span, latency, _ in spans)
    paces = [pace for _, _, pace in spans if pace]
    least_ms = max(_SILENT_MS, _SILENT_TOKENS * median(paces) if paces else 0.0)
    if share <= _SILENT_SHARE or silent_ms <= least_ms:
        return None
    level = ValidityLevel.INVALID if share > _SILENT_INVALID else ValidityLevel.SUSPECT
    return Found(level, f"answers go on for {silent_ms:.3g} ms after their last text, {share:.0%} of their time")


@check(
    name="one piece",
    suspect=f"more than {_ONE_PIECE_SHARE:.0%} of the answers of several tokens came in one piece, and not all",
    why="ITL and tokens/s/user are of the others alone; a proxy, or a server, that gathers text makes them nobody's",
)
def _one_piece(evidence: Evidence) -> Found | NotObserved | None:
    streamed = [
        record
        for record in evidence.answered
        if record.time_to_first_token is not None and (record.output_sequence_length or 0) > 1
    ]
    gathered = sum(record.inter_token_latency is None for record in streamed)
    if gathered <= _ONE_PIECE_SHARE * len(streamed) or gathered == len(streamed):  # all: there is no ITL anyway
        return None
    return Found(
        ValidityLevel.SUSPECT,
        f"{gathered:,} of {len(streamed):,} answers came in one piece, so ITL is of {len(streamed) - gathered:,}",
    )


@check(
    name="late client",
    suspect=f"the client takes more than {CLIENT_SUSPECT:.0%} of the time: of a closed loop's slots, the share that "
    "is empty over the steady part; at a rate, what requests wait to be sent over what they take in all",
    invalid=f"more than {CLIENT_INVALID:.0%}",
    why="that share of a server's slow-down does not show, and a closed loop has fewer requests in flight than asked",
)
def _late_client(evidence: Evidence) -> Found | NotObserved | None:
    held = [phases.mean_in_flight for phases in evidence.phases]
    if evidence.concurrency is not None and (known := [value for value in held if value is not None]):
        share = 1 - min(known) / evidence.concurrency
        said = f"{min(known):.3g} of {evidence.concurrency} requests were in flight on average"
    else:
        timed = [
            (max(0, record.start_ns - record.credit_issued_ns), record.end_ns - record.start_ns)
            for record in evidence.answered
            if record.credit_issued_ns is not None
        ]
        if not timed:
            return NotObserved("no record says when its request was due")
        waited, served = (sum(times) for times in zip(*timed, strict=True))
        share = waited / (waited + served) if waited else 0.0
        said = f"requests were sent {waited / len(timed) / 1e6:.3g} ms late on average"
    return client_share(share, f"{said}, so the client took {percent(share)} of the time")


@check(
    name="steady",
    suspect="a trial has no steady part; or TTFT, by more than 25 %, or ITL (E2E without a stream), by more than 10 %, "
    "differs from its first half to its second, at 99 %",
    why="a mean of a changing level depends on when one stops; an interval between those is too noisy to tell",
)
def _steady(evidence: Evidence) -> Found | NotObserved | None:
    judgements = [
        SteadinessResult(
            Steadiness.NOT_STEADY, "; ".join(filter(None, [f"no steady part: {phases.reason}", phases.remedy]))
        )
        if isinstance(phases, NoSteadyPart)
        else judge_trend(steady)
        for phases, steady in zip(evidence.phases, evidence.steady, strict=True)
    ]
    return _of_trials(judgements)


@check(
    name="warm-up",
    suspect="its later half differs from the measured steady part, by the same bounds",
    why="what was cold as measurement began is measured too; few requests can't tell, and no warm-up can't be judged",
)
def _warm_up(evidence: Evidence) -> Found | NotObserved | None:
    if not any(trial.warm_up for trial in evidence.trials):
        return NotObserved("no warm-up request was recorded")
    judgements = [
        SteadinessResult(Steadiness.UNKNOWN, "the measured part is not steady itself")
        if isinstance(phases, NoSteadyPart)
        else judge_warm_up(warm_up, trial.warm_up, steady)
        for trial, warm_up, phases, steady in zip(
            evidence.trials, evidence.warm_up_phases, evidence.phases, evidence.steady, strict=True
        )
    ]
    found = _of_trials(judgements)
    fewest = min(len(trial.warm_up) for trial in evidence.trials)
    if isinstance(found, NotObserved) and evidence.concurrency and fewest < warm_up_needed(evidence.concurrency):
        return NotObserved(f"{found.why}; it takes {warm_up_needed(evidence.concurrency)} warm-up requests to tell")
    return found


@check(
    name="prefix hits",
    suspect=f"prompts are unique, and more than {_HIT_SHARE:.0%} of their tokens came from the prefix cache",
    invalid=f"more than {_WRONG_SHARE:.0%}",
    why="those were not computed, so TTFT is another load's; a chat template's first block may be one of them",
)
def _prefix_hits(evidence: Evidence) -> Found | NotObserved | None:
    if evidence.prompts != "unique":
        return NotObserved("prompts share beginnings" if evidence.prompts else "nobody said whether prompts are unique")
    cached = [record.cached_input_tokens for record in evidence.answered]
    total = [record.input_sequence_length for record in evidence.answered]
    hits, tokens = _all_known(cached), _all_known(total)
    if not hits or not tokens:
        return NotObserved("not every answer's usage counts cached tokens")
    share = sum(hits) / sum(tokens)
    if share <= _HIT_SHARE:
        return None
    level = ValidityLevel.INVALID if share > _WRONG_SHARE else ValidityLevel.SUSPECT
    return Found(level, f"{percent(share)} of the tokens of unique prompts came from the prefix cache")


def _length(
    kind: str, lengths: Sequence[float | None], asked: AskedLength | None, share: float, slack_tokens: float
) -> Found | NotObserved | None:
    if asked is None:
        return NotObserved(f"the load asks for no {kind} length")
    if not (known := _all_known(lengths)):
        return NotObserved("not every answer has a usage" if lengths else "no request succeeded")
    mean = fmean(known)
    off = abs(mean - asked.mean)
    allowed = 3 * asked.stddev / math.sqrt(len(known))
    allowed += asked.slack
    if off <= max(slack_tokens, share * asked.mean + allowed):
        return None
    level = ValidityLevel.INVALID if off > _WRONG_SHARE * asked.mean + allowed else ValidityLevel.SUSPECT
    return Found(level, f"{kind} was {mean:.4g} tokens on average, {asked.mean:.4g} were asked")


def _of_trials(judgements: Sequence[SteadinessResult]) -> Found | NotObserved | None:
    """Combines the trials: one unsteady trial counts against the cell; an undecided one leaves the check unanswered."""

    def first(wanted: Steadiness) -> str | None:
        for number, judgement in enumerate(judgements, start=1):
            if judgement.steadiness is wanted:
                return f"trial {number}: {judgement.reason}" if len(judgements) > 1 else judgement.reason
        return None

    if said := first(Steadiness.NOT_STEADY):
        return Found(ValidityLevel.SUSPECT, said)
    if said := first(Steadiness.UNKNOWN):
        return NotObserved(said)
    return None


def _all_known(values: Sequence[float | None]) -> list[float]:
    """The values, or an empty list if any is unknown: the known ones would not be representative."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []
