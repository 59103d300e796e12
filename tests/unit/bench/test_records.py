"""The records that a real aiperf 0.13.0 wrote, against the figures that it computed itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtx.bench.metric_types import Figures, Spread, all_figures
from trtx.bench.metrics import (
    benchmark_duration,
    error_request_count,
    input_sequence_length,
    inter_token_latency,
    output_sequence_length,
    output_token_throughput,
    output_token_throughput_per_user,
    request_count,
    request_latency,
    request_throughput,
    time_to_first_token,
)
from trtx.bench.records import read_records, read_trial

TRIAL = Path(__file__).parents[1] / "report" / "golden" / "run" / "cells" / "agg-c2" / "trial-01"


def test_warm_up_requests_are_left_out() -> None:
    path = TRIAL / "profile_export.jsonl"
    assert len(path.read_text().splitlines()) == 14
    assert len(read_records(path)) == 12


def test_warm_up_requests_are_read_beside_the_measured_ones() -> None:
    trial = read_trial(TRIAL / "profile_export.jsonl")
    assert (len(trial.warm_up), len(trial.measured)) == (2, 12)
    assert max(record.end_ns for record in trial.warm_up) < min(record.start_ns for record in trial.measured)
    for record in (*trial.warm_up, *trial.measured):
        assert record.credit_issued_ns is not None and 0 < record.start_ns - record.credit_issued_ns < 100e6
        assert record.cached_input_tokens == 0


def test_our_figures_are_aiperfs_own() -> None:
    ours = Figures.over([read_records(TRIAL / "profile_export.jsonl")])
    theirs = json.loads((TRIAL / "profile_export_aiperf.json").read_text())
    spreads = [one for one in all_figures() if isinstance(one, Spread) and one.name in theirs]
    assert {time_to_first_token, inter_token_latency, request_latency} <= {*spreads}
    for spread in spreads:
        found, tag = ours[spread], theirs[spread.name]
        assert found is not None and (found.count, found.avg) == (tag["count"], pytest.approx(tag["avg"])), spread.name
        for q in spread.percentiles:
            assert found[q] == pytest.approx(tag[f"p{q}"]), (spread.name, q)
    per_user = theirs["output_token_throughput_per_user"]
    assert ours[output_token_throughput_per_user] == pytest.approx(per_user["p50"])
    for length in (input_sequence_length, output_sequence_length):
        assert ours[length] == pytest.approx(theirs[length.name]["avg"]), length.name
    # aiperf ends its clock at the last content, ours at the stream's end, a few ms later.
    for rate in (output_token_throughput, request_throughput, benchmark_duration):
        assert ours[rate] == pytest.approx(theirs[rate.name]["avg"], rel=0.05), rate.name
    assert ours[request_count] == theirs["request_count"]["avg"] == 12
    assert ours[error_request_count] == 0


def test_a_failed_request_keeps_its_reason(tmp_path: Path) -> None:
    entry = {
        "metadata": {"benchmark_phase": "profiling", "request_start_ns": 100, "request_end_ns": 200},
        "metrics": {"error_isl": {"value": 64, "unit": "tokens"}},
        "error": {"code": 503, "type": "Service Unavailable", "message": "no\nworkers"},
    }
    (tmp_path / "profile_export.jsonl").write_text(json.dumps(entry) + "\n")
    (record,) = read_records(tmp_path / "profile_export.jsonl")
    assert not record.succeeded
    assert record.error == "HTTP 503 no workers"


def test_an_answer_in_one_piece_has_no_time_between_its_tokens(tmp_path: Path) -> None:
    entry = {
        "metadata": {"benchmark_phase": "profiling", "request_start_ns": 100, "request_end_ns": 200},
        "metrics": {"inter_token_latency": {"value": 0.0, "unit": "ms"}},
    }
    (tmp_path / "profile_export.jsonl").write_text(json.dumps(entry) + "\n")
    (record,) = read_records(tmp_path / "profile_export.jsonl")
    assert record.inter_token_latency is None
