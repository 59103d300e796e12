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
from trtx.bench.phases import NoSteadyPart
from trtx.stats.percentiles import samples_needed

_WRONG_SHARE = 0.10  # of lengths and prefix hits: beyond it, the measured load is not the requested one
_OUTPUT_SHARE, _INPUT_SHARE = 0.01, 0.02
_INPUT_TOKENS = 2  # tokens of a chat template that aiperf and a server may count differently
_HIT_SHARE = 0.02
# Share of an answer's time after its last text, by which its measured latency is too short.
_SILENT_SHARE, _SILENT_INVALID = 0.10, 0.25
_SILENT_TOKENS = 2  # the end token has no text and takes one step
_ONE_PIECE_SHARE = 0.10
_CUT_SHARE = 0.10
# Delay that a busy client adds between two events; 3 to 12 ms were observed with ten busy processes per core.
_SILENT_MS = 10.0


@check(
    name="samples",
    suspect="fewer requests succeeded (in the steady part, if there is one) than a percentile in use needs: 11 for "
    "p50, 64 for p90, 662 for p99",
    invalid="no request succeeded",
    why="with fewer requests, a percentile is effectively the maximum",
)
def _samples(evidence: Evidence) -> Found | NotObserved | None:
    if not evidence.answered:
        return Found(ValidityLevel.INVALID, "no request succeeded")
    has_steady = not any(isinstance(phases, NoSteadyPart) for phases in evidence.phases)
    held = [record for records in evidence.steady for record in records if record.succeeded]
    count, where = (len(held), " in the steady part") if has_steady else (len(evidence.answered), "")
    short = [f"p{q} needs {samples_needed(q)}" for q in evidence.percentiles if count < samples_needed(q)]
    return Found(ValidityLevel.SUSPECT, f"{count} requests succeeded{where}, but {', '.join(short)}") if short else None


@check(
    name="model",
    suspect="answers name a different model from the requested one",
    invalid="answers name several models",
    why="a different name may be an alias or a different model, and a client can't tell which; an answer without a "
    "name proves nothing",
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
    suspect=f"the mean length of complete answers is more than {_OUTPUT_SHARE:.0%} off",
    invalid=f"it is more than {_WRONG_SHARE:.0%} off",
    why="latency and tokens/s depend on the length; if lengths are random, three standard errors are allowed in "
    "addition",
)
def _output_length(evidence: Evidence) -> Found | NotObserved | None:
    found = [record.output_sequence_length for record in evidence.answered]
    return _length("output", found, evidence.output_length, _OUTPUT_SHARE, 0)


@check(
    name="input length",
    suspect=f"the mean prompt length is more than {_INPUT_SHARE:.0%} and {_INPUT_TOKENS} tokens off",
    invalid=f"it is more than {_WRONG_SHARE:.0%} and {_INPUT_TOKENS} tokens off",
    why="TTFT depends on the length; servers count a chat template's tokens differently, up to 16 for a system "
    "message; random lengths get the same allowance as above; with images there is no check, because the model "
    "determines how many tokens an image has",
)
def _input_length(evidence: Evidence) -> Found | NotObserved | None:
    if evidence.has_images and evidence.input_length is not None:
        return NotObserved("the load sets the length of the text, but usage counts image tokens too")
    found = [record.input_sequence_length for record in evidence.answered]
    return _length("input", found, evidence.input_length, _INPUT_SHARE, _INPUT_TOKENS)


@check(
    name="answer format",
    suspect=f"max_tokens cut more than {_CUT_SHARE:.0%} of the answers that had to follow a format",
    why="a document or tool call that is cut is of no use to a client; answers that break their format are failed "
    "requests; the check is not made if an answer's format could not be checked",
)
def _answer_format(evidence: Evidence) -> Found | NotObserved | None:
    if not evidence.asks_formats:
        return None
    found = [record.answer_format for record in evidence.answered if record.answer_format is not None]
    if len(found) < len(evidence.answered):
        return NotObserved("aiperf's records don't contain what each request asked for")
    if unchecked := [one.reason for one in found if one.outcome == "unchecked"]:
        return NotObserved(f"{len(unchecked):,} of {len(found):,} answers were not checked: {unchecked[0]}")
    bound = [one for one in found if one.is_bound]
    cut = sum(one.outcome == "cut" for one in bound)
    if cut <= _CUT_SHARE * len(bound):
        return None
    return Found(
        ValidityLevel.SUSPECT,
        f"max_tokens cut {cut:,} of {len(bound):,} answers inside their document or tool call",
    )


@check(
    name="silent end",
    suspect=f"the median answer continues after its last text for more than {_SILENT_SHARE:.0%} of its duration, the "
    f"time of {_SILENT_TOKENS} tokens and {_SILENT_MS:g} ms",
    invalid=f"for more than {_SILENT_INVALID:.0%} of its duration",
    why="tokens without text (special tokens, or tokens that a server holds back or counts but never sends) raise "
    "tokens/s but are part of no latency",
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
    return Found(level, f"answers continue for {silent_ms:.3g} ms after their last text, {share:.0%} of their duration")


@check(
    name="one piece",
    suspect=f"more than {_ONE_PIECE_SHARE:.0%} of the answers with several tokens came in one piece, but not all",
    why="ITL and tokens/s/user then cover only the other answers; a proxy or server may be collecting text",
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
        f"{gathered:,} of {len(streamed):,} answers came in one piece, so ITL covers only {len(streamed) - gathered:,}",
    )


@check(
    name="late client",
    suspect=f"the client takes more than {CLIENT_SUSPECT:.0%} of the time. In a closed loop, that is the share of "
    "slots that are empty in the steady part; at a request rate, the time that requests wait to be sent divided by "
    "their total time",
    invalid=f"it takes more than {CLIENT_INVALID:.0%}",
    why="the metrics hide that share of a server's slow-down, and a closed loop has fewer requests in flight than "
    "requested",
)
def _late_client(evidence: Evidence) -> Found | NotObserved | None:
    held = [phases.mean_in_flight for phases in evidence.phases]
    if evidence.concurrency is not None and (known := [value for value in held if value is not None]):
        share = 1 - min(known) / evidence.concurrency
        measured = f"{min(known):.3g} of {evidence.concurrency} requests were in flight on average"
    else:
        timed = [
            (max(0, record.start_ns - record.credit_issued_ns), record.end_ns - record.start_ns)
            for record in evidence.answered
            if record.credit_issued_ns is not None
        ]
        if not timed:
            return NotObserved("no record has the time at which its request was due")
        waited, served = (sum(times) for times in zip(*timed, strict=True))
        share = waited / (waited + served) if waited else 0.0
        measured = f"requests were sent {waited / len(timed) / 1e6:.3g} ms late on average"
    return client_share(share, f"{measured}, so the client took {percent(share)} of the time")


@check(
    name="steady",
    suspect="a trial has no steady part; or, with 99 % confidence, TTFT differs by more than 25 % between the two "
    "halves of the steady part, or ITL (E2E without streaming) by more than 10 %",
    why="the mean of a changing latency depends on when the trial ends; if the confidence interval contains the bound, "
    "the check is not made",
)
def _steady(evidence: Evidence) -> Found | NotObserved | None:
    results = [
        SteadinessResult(
            Steadiness.NOT_STEADY, "; ".join(filter(None, [f"no steady part: {phases.reason}", phases.remedy]))
        )
        if isinstance(phases, NoSteadyPart)
        else judge_trend(steady)
        for phases, steady in zip(evidence.phases, evidence.steady, strict=True)
    ]
    return _of_trials(results)


@check(
    name="warm-up",
    suspect="latencies in the later half of the warm-up differ from the measured steady part, by the same bounds",
    why="the measurement would include a cold server; the check is not made with too few or no warm-up requests",
)
def _warm_up(evidence: Evidence) -> Found | NotObserved | None:
    if not any(trial.warm_up for trial in evidence.trials):
        return NotObserved("no warm-up request was recorded")
    results = [
        SteadinessResult(Steadiness.UNKNOWN, "the measured part itself is not steady")
        if isinstance(phases, NoSteadyPart)
        else judge_warm_up(warm_up, trial.warm_up, steady)
        for trial, warm_up, phases, steady in zip(
            evidence.trials, evidence.warm_up_phases, evidence.phases, evidence.steady, strict=True
        )
    ]
    found = _of_trials(results)
    fewest = min(len(trial.warm_up) for trial in evidence.trials)
    if isinstance(found, NotObserved) and evidence.concurrency and fewest < warm_up_needed(evidence.concurrency):
        return NotObserved(f"{found.why}; the check needs {warm_up_needed(evidence.concurrency)} warm-up requests")
    return found


@check(
    name="prefix hits",
    suspect=f"prompts are unique, but more than {_HIT_SHARE:.0%} of their tokens came from the prefix cache",
    invalid=f"more than {_WRONG_SHARE:.0%} of their tokens did",
    why="cached tokens are not computed, so TTFT belongs to an easier load; a few hits are normal, because prompts "
    "share the beginning of the chat template",
)
def _prefix_hits(evidence: Evidence) -> Found | NotObserved | None:
    if evidence.prompts != "unique":
        return NotObserved(
            "prompts share prefixes" if evidence.prompts else "it is not known whether prompts are unique"
        )
    cached = [record.cached_input_tokens for record in evidence.answered]
    total = [record.input_sequence_length for record in evidence.answered]
    hits, tokens = _all_known(cached), _all_known(total)
    if not hits or not tokens:
        return NotObserved("not every answer reports its cached tokens")
    share = sum(hits) / sum(tokens)
    if share <= _HIT_SHARE:
        return None
    level = ValidityLevel.INVALID if share > _WRONG_SHARE else ValidityLevel.SUSPECT
    return Found(level, f"{percent(share)} of the tokens of unique prompts came from the prefix cache")


def _length(
    kind: str, lengths: Sequence[float | None], asked: AskedLength | None, share: float, slack_tokens: float
) -> Found | NotObserved | None:
    if asked is None:
        return NotObserved(f"the load sets no {kind} length")
    if not (known := _all_known(lengths)):
        return NotObserved("not every answer reports its usage" if lengths else "no request succeeded")
    mean = fmean(known)
    off = abs(mean - asked.mean)
    allowed = 3 * asked.stddev / math.sqrt(len(known))
    allowed += asked.slack
    if off <= max(slack_tokens, share * asked.mean + allowed):
        return None
    level = ValidityLevel.INVALID if off > _WRONG_SHARE * asked.mean + allowed else ValidityLevel.SUSPECT
    return Found(level, f"the mean {kind} length was {mean:.4g} tokens, but {asked.mean:.4g} were requested")


def _of_trials(results: Sequence[SteadinessResult]) -> Found | NotObserved | None:
    """Combines the trials: one unsteady trial counts against the cell; an undecided one leaves the check unanswered."""

    def first(wanted: Steadiness) -> str | None:
        for number, result in enumerate(results, start=1):
            if result.steadiness is wanted:
                return f"trial {number}: {result.reason}" if len(results) > 1 else result.reason
        return None

    if reason := first(Steadiness.NOT_STEADY):
        return Found(ValidityLevel.SUSPECT, reason)
    if reason := first(Steadiness.UNKNOWN):
        return NotObserved(reason)
    return None


def _all_known(values: Sequence[float | None]) -> list[float]:
    """The values, or an empty list if any is unknown: the known ones would not be representative."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []
