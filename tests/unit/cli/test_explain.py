"""``trtx explain``: the stages of a kept run, a cause with its numbers, one request, and runs without stage times."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from judged_runs import a_run
from slow_cells import Times, request

from trtx.bench.records import RECORDS_FILE
from trtx.bench.stage_rows import write_rows
from trtx.cli.app import run as trtx

Said = pytest.CaptureFixture[str]


@pytest.fixture
def slow_run(tmp_path: Path) -> Path:
    """A run whose records of one cell are those of requests that waited in the queue."""
    run = a_run(tmp_path / "run")
    cell = next(path for path in sorted((run / "cells").iterdir()) if path.is_dir())
    lines, records = [], []
    for number in range(20):
        record, rows = request(number, Times(queue=0.2))
        lines += [json.dumps({k: v for k, v in msgspec.to_builtins(row).items() if v is not None}) for row in rows]
        metrics = {
            name: {"value": getattr(record, name)}
            for name in ("time_to_first_token", "inter_token_latency", "request_latency", "output_sequence_length")
        }
        metadata = {
            "benchmark_phase": "profiling", "x_request_id": record.request_id, "request_start_ns": record.start_ns,
            "request_end_ns": record.end_ns, "credit_issued_ns": record.credit_issued_ns,
        }  # fmt: skip
        records.append(json.dumps({"metadata": metadata, "metrics": metrics}))
    for trial in cell.glob("trial-*"):
        write_rows(trial, lines)
        (trial / RECORDS_FILE).write_text("".join(f"{line}\n" for line in records))
    return run


def test_a_cause_is_printed_with_its_numbers(slow_run: Path, capsys: Said) -> None:
    assert trtx(["explain", str(slow_run)]) == 0

    said = capsys.readouterr().out
    assert "Queue: requests wait for a free slot or for KV blocks (queue is 200 ms of TTFT p50 235 ms)" in said
    assert "The largest part of TTFT p50 235 ms is queue with 200 ms (85.1 %)" in said


def test_json_has_the_stages_and_the_cause(slow_run: Path, capsys: Said) -> None:
    assert trtx(["explain", str(slow_run), "--json"]) == 0

    cells = json.loads(capsys.readouterr().out)["cells"]
    (explained,) = [one for one in cells if one["unknown"] is None]
    assert [one["name"] for one in explained["causes"]] == ["queue"]
    assert explained["ttft"][0]["stages"]["queue"] == pytest.approx(200.0)
    assert all(one["unknown"] for one in cells if one is not explained)


def test_one_cell_and_one_request_can_be_chosen(slow_run: Path, capsys: Said) -> None:
    name = sorted(path.name for path in (slow_run / "cells").iterdir() if path.is_dir())[0]
    assert trtx(["explain", str(slow_run), "--cell", name]) == 0
    assert capsys.readouterr().out.startswith(f"{name}: ")

    assert trtx(["explain", str(slow_run), "--request", "00000000-0000-4000-8000-000000000003", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["cell"], found["workers"]) == (name, ["agg-0"])

    assert trtx(["explain", str(slow_run), "--request", "nope"]) == 2
    assert "no measured request with stage times has the id 'nope'" in capsys.readouterr().err
    assert trtx(["explain", str(slow_run), "--cell", "nope"]) == 2
    assert "--cell 'nope' is not in this run; expected one of" in capsys.readouterr().err


def test_a_run_of_an_earlier_trtx_says_that_it_has_no_stage_times(tmp_path: Path, capsys: Said) -> None:
    run = a_run(tmp_path / "run")
    assert trtx(["explain", str(run)]) == 0
    assert "this run has no stage times" in capsys.readouterr().out
    assert trtx(["explain", str(run), "--request", "a"]) == 2
    assert "this run has no stage times" in capsys.readouterr().err


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: Said) -> None:
    assert trtx(["explain", str(tmp_path)]) == 2
    assert "has no finished cell; expected a run directory of trtx bench" in capsys.readouterr().err
