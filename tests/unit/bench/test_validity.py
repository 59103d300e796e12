"""Each check of a cell, on evidence that speaks against it, that does not, and none; and its row in the document."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bench.simulated_load import MS, Request, closed_loop, drawn, open_loop
from trtx.bench.cores import STOLEN, BusyProcess, CpuReading, CpuUse, Scope, used
from trtx.bench.handoffs import NO_PREFILL, HandoffCounts
from trtx.bench.judge.checks import ValidityLevel, all_checks, check
from trtx.bench.judge.evidence import AskedLength, Evidence, event_loop_delays_ms
from trtx.bench.judge.validity import Unchecked, judge
from trtx.bench.readings import ForeignProcess, GpuReading
from trtx.bench.records import RecordedFormat, RequestRecord, TrialRecords, read_trial

KEPT = Path(__file__).parents[1] / "report" / "golden" / "run" / "cells" / "agg-c2" / "trial-01"
SLOTS = 4
GPU = GpuReading("GPU 0", 1980, 1980, ("power limit",), 699.0, 61, 70 * 2**30, ())

Change = Callable[[RequestRecord], dict[str, Any]]


def _loop(count: int = 200, **how: Any) -> tuple[RequestRecord, ...]:
    requests = [replace(request, tokens=40) for request in drawn(random.Random(1), count)]
    records = closed_loop(requests, SLOTS, **how).records
    return tuple(
        replace(record, credit_issued_ns=record.start_ns - MS, cached_input_tokens=0.0, models=("asked",))
        for record in records
    )


GOOD = Evidence(
    trials=(TrialRecords(_loop(80), _loop()),),
    concurrency=SLOTS,
    model="asked",
    input_length=AskedLength(64),
    output_length=AskedLength(40),
    percentiles=(50, 90),
    prompts="unique",
    restarted=(),
    requests_by_worker={"prefill": {"prefill-0": 200}, "decode": {"decode-0": 105, "decode-1": 95}},
    handoffs={
        "decode-0": {"prefill-0": HandoffCounts(read=100, nothing=5)},
        "decode-1": {"prefill-0": HandoffCounts(95)},
    },
    routes_by_prefix=False,
    event_loop_delays_ms={},
    gpus=(GPU, GPU, GPU),
    cpu=CpuUse(2, 20.0, 0.9, {"sshd (pid 7)": 0.9}, "run"),
)


def _with(change: Change, every: int = 1) -> Evidence:
    (trial,) = GOOD.trials
    changed = [
        replace(record, **change(record)) if i % every == 0 else record for i, record in enumerate(trial.measured)
    ]
    return replace(GOOD, trials=(TrialRecords(trial.warm_up, tuple(changed)),))


def _formats(*outcomes: str | None) -> Evidence:
    """Answers with these outcomes in turn; None: the record doesn't say what the request asked for."""
    (trial,) = GOOD.trials
    found = [None if one is None else RecordedFormat(("format",), one, f"{one} for a reason") for one in outcomes]
    records = [replace(one, answer_format=found[at % len(found)]) for at, one in enumerate(trial.measured)]
    return _measured(tuple(records), asks_formats=True)


def _measured(records: tuple[RequestRecord, ...], **said: Any) -> Evidence:
    return replace(GOOD, trials=(TrialRecords(GOOD.trials[0].warm_up, records),), **said)


def _failed(record: RequestRecord) -> dict[str, Any]:
    return {"error": "HTTP 500", "output_sequence_length": None, "input_sequence_length": None}


def _silent(share: float) -> Change:
    """Its last text was there before the end, as long as this share of its time."""

    def change(record: RequestRecord) -> dict[str, Any]:
        assert record.request_latency is not None
        return {"end_ns": record.start_ns + round(record.request_latency * MS / (1 - share))}

    return change


def _slower(factor: float) -> tuple[RequestRecord, ...]:
    requests = [Request(50 if i < 100 else factor * 50, 5 + i % 3 / 10, 40) for i in range(200)]
    return tuple(
        replace(r, credit_issued_ns=r.start_ns, cached_input_tokens=0.0) for r in closed_loop(requests, 4).records
    )


def _foreign(percent: float | None) -> tuple[GpuReading, ...]:
    others = (ForeignProcess(77, "Xorg", 0.0), ForeignProcess(78, "train.py", percent))
    return (GPU, replace(GPU, foreign=others), GPU)


def _slowed(*reasons: str, times: int = 1) -> tuple[GpuReading, ...]:
    slow = [replace(GPU, sm_clock_mhz=1200 + i, temperature_c=88 - i, clock_reasons=reasons) for i in range(times)]
    return (GPU, *slow, GPU)


def _busy(share: float, scope: Scope = "run", **by_user: float) -> CpuUse:
    """Others had this share of the time of four cores."""
    return CpuUse(4, 100.0, 100 * share, by_user, scope)


def _daemon_beside_idle_cores() -> CpuUse:
    """A process that fills a core, of 128 that a run of two leaves idle."""
    readings = [
        CpuReading(128, 128.0 * s, 125.0 * s, 3.0 * s, 0.0, 2.0 * s, (BusyProcess(9, "backup", 1.0),)) for s in range(9)
    ]
    found = used(readings)
    assert found is not None
    return found


def _lost(recomputed: int) -> dict[str, dict[str, HandoffCounts]]:
    """Of 200 requests, all those lost of one pair."""
    lost = HandoffCounts(read=100 - recomputed, recomputed=recomputed)
    return {
        "decode-0": {"prefill-0": HandoffCounts(read=50), "prefill-1": lost},
        "decode-1": {"prefill-0": HandoffCounts(50)},
    }


def _uneven(**counts: int) -> dict[str, dict[str, int]]:
    return {"prefill": {"prefill-0": sum(counts.values())}, "decode": counts}


SHOWN: list[tuple[str, ValidityLevel, Evidence, str]] = [
    ("samples", ValidityLevel.INVALID, _with(_failed), "no request succeeded"),
    ("samples", ValidityLevel.SUSPECT, _measured(_loop(50)), "42 requests succeeded in the steady part, but p90"),
    ("samples", ValidityLevel.SUSPECT, _measured(_loop(10)), "10 requests succeeded, but p50 needs 11, p90 needs 64"),
    ("model", ValidityLevel.SUSPECT, _with(lambda r: {"models": ("other",)}),
     "answers name model 'other', but 'asked' was requested"),
    ("model", ValidityLevel.INVALID, _with(lambda r: {"models": ("other",)}, every=100),
     "answers name several models, 'asked' (198), 'other' (2), but 'asked' was requested"),
    ("model", ValidityLevel.INVALID, _with(lambda r: {"models": ("asked", "other")}),
     "answers name several models"),  # each in itself
    ("output length", ValidityLevel.SUSPECT, _with(lambda r: {"output_sequence_length": 39}),
     "the mean output length was 39 tokens, but 40 were requested"),
    ("output length", ValidityLevel.INVALID, _with(lambda r: {"output_sequence_length": 400}, every=10),
     "the mean output length was 76 tokens, but 40 were requested"),
    ("input length", ValidityLevel.SUSPECT, _with(lambda r: {"input_sequence_length": 67}),
     "the mean input length was 67 tokens, but 64 were requested"),
    ("input length", ValidityLevel.INVALID, _with(lambda r: {"input_sequence_length": 3}),
     "the mean input length was 3 tokens, but 64 were requested"),
    ("silent end", ValidityLevel.SUSPECT, _with(_silent(0.15)), "after their last text, 15% of their duration"),
    ("silent end", ValidityLevel.INVALID, _with(_silent(0.5)), "after their last text, 50% of their duration"),
    ("one piece", ValidityLevel.SUSPECT, _with(lambda r: {"inter_token_latency": None}, every=5),
     "40 of 200 answers came in one piece, so ITL covers only 160"),
    ("answer format", ValidityLevel.SUSPECT, _formats("kept", "cut", "free", "kept"),
     "max_tokens cut 50 of 150 answers inside their document or tool call"),
    ("late client", ValidityLevel.SUSPECT, _measured(_loop(gap_ms=40, stagger_ms=5)),
     "3.44 of 4 requests were in flight on average, so the client took 14 % of the time"),
    ("late client", ValidityLevel.INVALID, _measured(_loop(gap_ms=150, stagger_ms=5)),
     "2.48 of 4 requests were in flight on average, so the client took 38 % of the time"),
    ("late client", ValidityLevel.SUSPECT,
     replace(_with(lambda r: {"credit_issued_ns": r.start_ns - 50 * MS}), concurrency=None),
     "requests were sent 50 ms late on average, so the client took 16.9 % of the time"),
    ("client's event loops", ValidityLevel.SUSPECT,
     replace(GOOD, event_loop_delays_ms={"worker_1": (900.0, 1500.0), "records_manager_2": (9e6,)}),
     "aiperf's worker_1 was blocked for 19.3 % of the measured time"),
    ("client's event loops", ValidityLevel.INVALID, replace(GOOD, event_loop_delays_ms={"timing_manager_3": (9000.0,)}),
     "aiperf's timing_manager_3 was blocked for 72.4 % of the measured time"),
    ("steady", ValidityLevel.SUSPECT, _measured(_slower(3)), "TTFT was 2.9"),
    ("steady", ValidityLevel.SUSPECT, _measured(_loop(10)),
     "no steady part: 2 requests were sent between the end of the first round and the last request, but 4 are needed; "
     "measure 16 requests or more"),
    ("steady", ValidityLevel.SUSPECT, replace(GOOD, trials=(*GOOD.trials, TrialRecords((), _slower(3)))),
     "trial 2: TTFT was 2.9"),
    ("warm-up", ValidityLevel.SUSPECT,
     replace(GOOD, trials=(TrialRecords(
         tuple(replace(r, time_to_first_token=500.0) for r in GOOD.trials[0].warm_up), GOOD.trials[0].measured),)),
     "TTFT was 0.0996 times as long in the measured part as late in the warm-up"),
    ("restarts", ValidityLevel.INVALID, replace(GOOD, restarted=("decode-0", "decode-0")),
     "restarted during the measurement: decode-0, decode-0"),
    ("uneven workers", ValidityLevel.SUSPECT, replace(GOOD, requests_by_worker=_uneven(a=150, b=50)),
     "a got 150 of 200 requests; an equal share is 100"),
    ("uneven workers", ValidityLevel.SUSPECT, replace(GOOD, requests_by_worker=_uneven(a=67, b=66, c=67, d=0)),
     "d got 0 of 200 requests; an equal share is 50"),  # the others have no 20 % more
    ("uneven workers", ValidityLevel.SUSPECT,
     replace(GOOD, requests_by_worker=_uneven(a=150, b=50), prompts="shared"),
     "a got 150 of 200 requests"),  # by a router that does not look at prompts
    ("uneven workers", ValidityLevel.SUSPECT,
     replace(GOOD, requests_by_worker=_uneven(a=150, b=50), routes_by_prefix=True),
     "a got 150 of 200 requests"),  # by one that finds no two alike
    ("lost handoffs", ValidityLevel.SUSPECT, replace(GOOD, handoffs=_lost(recomputed=5)),
     "5 of 200 prompts were computed without the KV of a prefill worker; 5 of them went from prefill-1 to decode-0"),
    ("lost handoffs", ValidityLevel.INVALID, replace(GOOD, handoffs=_lost(recomputed=11)), "11 of 200 prompts"),
    ("lost handoffs", ValidityLevel.INVALID,
     replace(GOOD, handoffs={"decode-0": {NO_PREFILL: HandoffCounts(whole=200)}}),
     "200 of 200 prompts were computed without the KV of a prefill worker; 200 of them went from no prefill worker"),
    ("prefix hits", ValidityLevel.SUSPECT, _with(lambda r: {"cached_input_tokens": 32}, every=10),
     "5 % of the tokens of unique prompts came from the prefix cache"),
    ("prefix hits", ValidityLevel.INVALID, _with(lambda r: {"cached_input_tokens": 48}),
     "75 % of the tokens of unique prompts came from the prefix cache"),
    ("throttled GPU", ValidityLevel.SUSPECT, replace(GOOD, gpus=_slowed("power limit", "thermal, by hardware")),
     "GPU 0 was throttled in 1 of 3 readings (thermal, by hardware) at 1200 of 1980 MHz, 88 °C"),
    ("throttled GPU", ValidityLevel.SUSPECT, replace(GOOD, gpus=_slowed("hardware slowdown", times=2)),
     "GPU 0 was throttled in 2 of 4 readings (hardware slowdown) at 1200 of 1980 MHz, 88 °C"),
    ("throttled GPU", ValidityLevel.SUSPECT, replace(GOOD, gpus=(*_slowed("power brake"), GpuReading("GPU 1"))),
     "GPU 0 was throttled in 1 of 3 readings (power brake)"),  # whatever is not known of another
    ("foreign GPU use", ValidityLevel.SUSPECT,
     replace(GOOD, gpus=_foreign(None)), "was on GPU 0, using up to 0 % of its time"),
    ("foreign GPU use", ValidityLevel.SUSPECT,
     replace(GOOD, gpus=(replace(GPU, foreign=(ForeignProcess(78, None),)),)),
     "a process (pid 78) was on GPU 0, its use is unknown"),
    ("foreign GPU use", ValidityLevel.INVALID, replace(GOOD, gpus=_foreign(40.0)),
     "train.py (pid 78) was on GPU 0, using up to 40 % of its time"),
    ("foreign CPU use", ValidityLevel.SUSPECT,
     replace(GOOD, cpu=_busy(0.05, **{"pytest (pid 5)": 3.0, "ld (pid 6)": 1.0})),
     "processes outside the run used 5 % of the time of 4 cores, most of it by pytest (pid 5)"),
    ("foreign CPU use", ValidityLevel.SUSPECT, replace(GOOD, cpu=_busy(0.3, "client", **{STOLEN: 2.9})),
     "used 30 % of the time of 4 cores of the client's machine"),  # whose, can't be seen
]  # fmt: skip

BARE = Evidence(trials=GOOD.trials, concurrency=SLOTS)


def test_a_cell_with_nothing_against_it_is_valid_and_all_of_it_was_checked() -> None:
    found = judge(GOOD)
    assert (found.level, found.reasons, found.unchecked) == (ValidityLevel.VALID, (), ())


@pytest.mark.parametrize(("name", "level", "evidence", "sentence"), SHOWN)
def test_a_check_gives_its_reason(name: str, level: ValidityLevel, evidence: Evidence, sentence: str) -> None:
    found = judge(evidence)
    (reason,) = [reason for reason in found.reasons if reason.name == name]
    assert sentence in reason.sentence
    assert reason.level is level
    assert found.level is (
        ValidityLevel.INVALID if ValidityLevel.INVALID in {r.level for r in found.reasons} else ValidityLevel.SUSPECT
    )
    assert found.reasons[0].level is found.level


def test_prompts_that_the_router_left_to_decode_workers_are_not_lost() -> None:
    handoffs = {"decode-0": {NO_PREFILL: HandoffCounts(local=150), "prefill-0": HandoffCounts(read=50)}}
    assert judge(replace(GOOD, handoffs=handoffs)).level is ValidityLevel.VALID


def test_every_level_of_every_check_is_shown() -> None:
    said = {(made.name, ValidityLevel.SUSPECT) for made in all_checks() if made.suspect}
    said |= {(made.name, ValidityLevel.INVALID) for made in all_checks() if made.invalid}
    shown = {(name, level) for name, level, _, _ in SHOWN}
    assert shown == said, f"show it in SHOWN of {Path(__file__).name}, or say it in the check's record: {shown ^ said}"


def test_what_nobody_observed_is_not_passed_in_silence() -> None:
    found = judge(BARE)
    assert found.level is ValidityLevel.VALID
    assert {unchecked.name for unchecked in found.unchecked} == {made.name for made in all_checks()} - {
        "samples", "silent end", "one piece", "late client", "steady", "warm-up",  # which records alone can answer
        "answer format",  # of requests that can't ask for one
    }  # fmt: skip
    assert "not checked: restarts (the server's processes were not supervised)" in map(str, found.unchecked)


@pytest.mark.parametrize(
    ("name", "evidence", "why"),
    [
        ("model", _with(lambda r: {"models": ()}), "no answer names its model"),
        ("output length", _with(lambda r: {"output_sequence_length": None}, every=50), "not every answer reports"),
        ("late client", replace(_with(lambda r: {"credit_issued_ns": None}), concurrency=None),
         "at which its request was due"),
        ("input length", replace(_with(lambda r: {"input_sequence_length": 641}), has_images=True),
         "usage counts image tokens too"),
        ("prefix hits", _with(lambda r: {"cached_input_tokens": None}, every=50), "not every answer reports its"),
        ("prefix hits", replace(GOOD, prompts="shared"), "prompts share prefixes"),
        ("answer format", _formats("kept", "unchecked"), "100 of 200 answers were not checked: unchecked for a reason"),
        ("answer format", _formats("kept", None), "aiperf's records don't contain what each request asked for"),
        ("warm-up", replace(GOOD, trials=(TrialRecords((), GOOD.trials[0].measured),)), "no warm-up request was"),
        ("warm-up", replace(GOOD, trials=(TrialRecords(_loop(4), GOOD.trials[0].measured),)),
         "the check needs 25 warm-up requests"),
        ("warm-up", _measured(_loop(10)), "the measured part itself is not steady"),
        ("steady", _measured(_loop(20)), "6 requests have a TTFT, but 8 are needed on each side"),
        ("throttled GPU", replace(GOOD, gpus=None), "GPUs were not read throughout the measured part"),
        ("throttled GPU", replace(GOOD, gpus=(GPU, replace(GPU, name="GPU 1", clock_reasons=None))),
         "NVML does not report why clocks of GPU 1 are reduced"),
        ("foreign GPU use", replace(GOOD, gpus=None), "GPUs were not read throughout the measured part"),
        ("foreign GPU use", replace(GOOD, gpus=(GPU, replace(GPU, name="GPU 1", foreign=None))),
         "NVML does not show here which processes are on GPU 1, as in a container without --pid=host"),
        ("foreign CPU use", replace(GOOD, cpu=None), "cores were not read throughout the measured part"),
        ("foreign CPU use", replace(GOOD, cpu=_busy(0.0, "client")),
         "only the client's machine was checked, not the deployment's"),
        ("foreign CPU use", replace(GOOD, cpu=_busy(0.9, "unknown")),
         "the deployment runs on this machine, and its processes are not known"),
        ("lost handoffs", replace(GOOD, handoffs=None), "handoffs were not counted"),
        ("lost handoffs", replace(GOOD, handoffs={"decode-0": {"prefill-0": HandoffCounts(unknown=200)}}),
         "the decode workers' engine does not report whether KV arrived"),
        ("uneven workers", replace(GOOD, requests_by_worker=None), "requests were not counted by worker"),
        ("uneven workers",
         replace(GOOD, requests_by_worker=_uneven(a=150, b=50), routes_by_prefix=True, prompts="shared"),
         "a got 150 of 200 requests; an equal share is 100, which a router may intend if prompts share prefixes"),
        ("uneven workers",
         replace(GOOD, requests_by_worker=_uneven(a=150, b=50), routes_by_prefix=None, prompts="shared"),
         "which a router may intend"),
    ],
)  # fmt: skip
def test_evidence_that_is_too_little_leaves_a_check_open(name: str, evidence: Evidence, why: str) -> None:
    found = judge(evidence)
    assert name not in {reason.name for reason in found.reasons}
    (unchecked,) = [unchecked for unchecked in found.unchecked if unchecked.name == name]
    assert why in unchecked.why
    assert str(unchecked) == f"not checked: {name} ({unchecked.why})"


@pytest.mark.parametrize(
    "evidence",
    [
        _with(lambda r: {"input_sequence_length": 66}),  # a template's tokens
        _formats(*["kept"] * 9, "cut"),
        _with(_failed, every=40),  # failures have their own status
        replace(GOOD, requests_by_worker=_uneven(a=6, b=2)),  # chance
        replace(GOOD, requests_by_worker=_uneven(a=0, b=0)),
        replace(GOOD, requests_by_worker={"agg": {"agg-0": 200}}),
        _with(lambda r: {"models": ()}, every=2),  # an answer without a name proves nothing
        _with(_silent(0.5), every=3),  # some end with a token that has no text
        _with(_silent(0.09)),
        _with(lambda r: {"inter_token_latency": None}, every=10),
        replace(GOOD, gpus=()),  # no GPU in it
        replace(GOOD, cpu=_busy(0.049)),
        replace(GOOD, cpu=_daemon_beside_idle_cores()),
        replace(GOOD, gpus=_slowed("hardware slowdown")),  # as its clock changed
        replace(GOOD, event_loop_delays_ms={"worker_1": (30.0,)}),
    ],
)
def test_what_is_within_bounds_speaks_against_nothing(evidence: Evidence) -> None:
    found = judge(evidence)
    assert (found.level, found.reasons, found.unchecked) == (ValidityLevel.VALID, (), ())


def test_lengths_that_were_drawn_may_miss_their_mean_by_chance() -> None:
    drawn_lengths = _with(lambda r: {"output_sequence_length": 42})
    assert judge(drawn_lengths).level is ValidityLevel.SUSPECT
    assert judge(replace(drawn_lengths, output_length=AskedLength(40, stddev=10))).level is ValidityLevel.VALID


def test_a_server_that_falls_behind_its_rate_is_not_steady() -> None:
    for apart_ms in (20, 35, 42):  # of 50 ms that one prompt takes
        arrivals = [apart_ms * i for i in range(300)]
        records = open_loop(drawn(random.Random(5), 300), arrivals, serial_prefill=True).records
        found = judge(Evidence(trials=(TrialRecords((), tuple(records)),), concurrency=None))
        assert "steady" in {reason.name for reason in found.reasons}, apart_ms


def test_a_real_cell_is_judged_by_its_records_alone() -> None:
    trial = read_trial(KEPT / "profile_export.jsonl")
    evidence = Evidence(
        trials=(trial,), concurrency=2, input_length=AskedLength(64), output_length=AskedLength(16), prompts="unique"
    )
    found = judge(evidence)
    assert [(reason.name, reason.sentence) for reason in found.reasons] == [
        ("samples", "8 requests succeeded in the steady part, but p50 needs 11")
    ]
    assert {"steady", "warm-up"} < {unchecked.name for unchecked in found.unchecked}  # 12 requests tell neither


def test_event_loop_delays_are_read_from_aiperfs_log() -> None:
    log = (
        "10:47:01 WARNING  Event loop for worker_0dfdb4af is taking too long to run. Overhead: 35.20ms\n"
        "10:47:02 WARNING  something else\n"
        "10:47:03 WARNING  Event loop for worker_0dfdb4af is taking too long to run. Overhead: 1,035.00ms\n"
    )
    assert event_loop_delays_ms(log) == {"worker_0dfdb4af": (35.2, 1035.0)}
    assert event_loop_delays_ms("") == {}


def test_two_checks_of_one_name_are_an_error_when_the_program_is_read() -> None:
    with pytest.raises(ValueError, match="two checks are called samples"):
        check(name="samples", why="x")(lambda evidence: None)


def test_an_unchecked_reason_says_so() -> None:
    assert str(Unchecked("restarts", "x")) == "not checked: restarts (x)"
