"""``benchmarks/recompute_run.py``: what it computes of aiperf's records by itself is what trtx says in every form."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from examples import examples, first_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy.special import stdtrit

from trtx.bench import cell_directory, cell_name, trial_directory
from trtx.bench.cells import CELL as CELL_FILE
from trtx.bench.cells import measure_cell
from trtx.bench.readings import ForeignProcess, GpuReading, ServerReading, write_readings
from trtx.bench.records import RECORDS_FILE
from trtx.experiment import gate
from trtx.experiment.bench.resumption import read_recorded
from trtx.experiment.bench.spec import ExperimentSpec
from trtx.experiment.directory import write_lock
from trtx.report import render
from trtx.runs.forms import LOCK, AskedRun

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "golden"
sys.path.insert(0, str(ROOT / "benchmarks"))
from recompute_run import check_run  # noqa: E402  # a script, which finds its modules beside itself
from recomputed.intervals import student  # noqa: E402

START_NS = 1_795_307_884_464_416_102
MS = 1_000_000


def recompute(run: Path) -> subprocess.CompletedProcess[str]:
    script = ROOT / "benchmarks" / "recompute_run.py"
    return subprocess.run([sys.executable, str(script), str(run)], capture_output=True, text=True, timeout=60)


def edit(path: Path, old: str, new: str) -> None:
    before = path.read_text(encoding="utf-8")
    assert old in before, f"{path} has no {old}"
    path.write_text(before.replace(old, new, 1), encoding="utf-8")


CELL, RECORDS = "cells/agg-c1/cell.json", "cells/agg-c1/trial-01/profile_export.jsonl"
SUPPORTED = '"time_to_first_token_percentiles_supported": "p50'


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    first_of(
        5,
        [
            (CELL, "26.8770013", "26.8770014", "trial-01.figures.time_to_first_token.p90"),
            (
                "summary.json",
                '"steady_request_latency_p99": 1',
                '"steady_request_latency_p99": 2',
                "steady_request_laten",
            ),
            ("summary.csv", "1.313557681", "1.313557682", "agg-c1.benchmark_duration"),
            ("summary.md", "| 146 |", "| 147 |", "agg-c1.tokens/s"),
            (RECORDS, '"benchmark_phase":"profiling"', '"benchmark_phase":"warmup"', "trial-01: records"),
            (CELL, '"steady": {', '"steady": {"tokens": 1,', "trial-01.steady.tokens"),
            (CELL, '"status": "ok"', '"status": "errors"', "ok"),
            (CELL, '"output_token_throughput_per_device": 1', '"output_token_throughput_per_device": 2', "per_device"),
            ("summary.json", SUPPORTED, f"{SUPPORTED} p90", "p50 p90"),
            ("summary.json", 'throughput_low": null', 'throughput_low": 0', "agg-c1.output_token_throughput_low"),
            ("summary.csv", "request_throughput_low", "request_throughput_floor", "request_throughput_floor"),
            ("summary.md", "| ~", "| ", "agg-c1.TTFT p99"),
            (RECORDS, '"benchmark_phase":"warmup"', '"benchmark_phase":"profiling"', "trial-01: records"),
        ],
    ),
)
def test_a_figure_that_is_another_is_told_with_its_place(
    measured_run: Path, name: str, old: str, new: str, told: str
) -> None:
    render(measured_run)
    edit(measured_run / name, old, new)
    table = check_run(measured_run).table()
    assert told in table, table


@pytest.mark.parametrize("scope", ["cell", "trial"])
def test_a_number_of_the_table_that_is_another_is_told_with_its_place(measured_run: Path, scope: str) -> None:
    render(measured_run)
    table = pd.read_parquet(measured_run / "summary.parquet")
    table.loc[(table["scope"] == scope) & (table["load"] == "c2"), "time_to_first_token_p90"] *= 1.0001
    table.to_parquet(measured_run / "summary.parquet", index=False)
    told = check_run(measured_run).table()
    place = "agg-c2" if scope == "cell" else "agg-c2 trial 1"
    assert re.search(rf"summary.parquet +{place}.time_to_first_token_p90 ", told) and told.count("\n") == 2, told


@pytest.mark.slow
def test_a_run_without_a_mismatch_is_exit_0_with_one_it_is_1_and_no_run_is_exit_2(measured_run: Path) -> None:
    render(measured_run)
    done = recompute(measured_run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"[\d,]+ numbers and texts compared, 0 mismatches\n", done.stdout)
    shutil.copytree(measured_run / "cells/agg-c1/trial-01", measured_run / "cells/agg-c1/trial-02")
    done = recompute(measured_run)
    assert done.returncode == 1 and "trial-02  not there  a trial" in done.stdout and "1 mismatches" in done.stdout
    done = recompute(measured_run / "cells")
    assert done.returncode == 2 and done.stderr.startswith("usage: ")


def test_a_metric_that_came_after_the_run_is_not_missed(golden_run: Path) -> None:
    for path in golden_run.glob("cells/*/cell.json"):
        cell = json.loads(path.read_text(encoding="utf-8"))
        for measured in (cell, *cell["trials"]):
            for part in ("figures", "steady"):
                del measured[part]["images_per_second"]
        path.write_text(json.dumps(cell | {"schema_version": 4}), encoding="utf-8")
    render(golden_run)
    assert not (comparison := check_run(golden_run)).mismatches, comparison.table()


@st.composite
def _requests(draw: st.DrawFn, count: int) -> list[dict[str, Any]]:
    """Lines of aiperf's records, of a closed loop of two with now and then a failure, a gap or an answer uncounted."""
    free, lines = [START_NS, START_NS + draw(st.integers(0, 50 * MS))], []
    odd = draw(st.sampled_from(("none", "failed", "cancelled", "uncounted", "at once")))
    odd_at = draw(st.sets(st.integers(0, count - 1), max_size=count))
    for number in range(count):
        free.sort()
        start = free[0] + draw(st.integers(0, 5 * MS))
        tokens = draw(st.integers(1, 9))
        # Of a few ns, a percentile between two lies halfway between what three digits can say.
        first, itl = draw(st.integers(MS // 10, 40 * MS)), draw(st.integers(MS // 10, 9 * MS))
        last = first + (tokens - 1) * itl
        kind = odd if number in odd_at else "none"
        metrics = {
            "time_to_first_token": first / MS,
            "request_latency": last / MS,
            "input_sequence_length": draw(st.integers(60, 68)),
            "output_sequence_length": tokens,
        }
        if tokens > 1:
            metrics["inter_token_latency"] = 0 if kind == "at once" else (last - first) / MS / (tokens - 1)
        if kind == "uncounted":
            del metrics["output_sequence_length"]
            metrics.pop("inter_token_latency", None)
        free[0] = start + last + draw(st.integers(0, MS))
        lines.append(
            {
                "metadata": {
                    "benchmark_phase": "profiling", "request_start_ns": start, "request_end_ns": free[0],
                    "was_cancelled": kind == "cancelled",
                },
                "metrics": {name: {"value": value} for name, value in metrics.items()},
                "error": {"type": "X", "message": "no"} if kind == "failed" else None,
            }
        )  # fmt: skip
    return lines


@st.composite
def _readings(draw: st.DrawFn) -> list[ServerReading]:
    """Readings of two GPUs during a trial, at irregular times; now and then a value, a reading or a counter is odd."""
    at_ns, joules, found = START_NS - draw(st.integers(0, 500 * MS)), 0.0, []
    odd = draw(st.sampled_from(("none", "none", "reset", "shared", "no energy", "no use", "unread")))
    odd_at = draw(st.integers(0, 12))
    for number in range(draw(st.integers(0, 40))):
        kind = odd if number == odd_at else "none"
        joules = 0.0 if kind == "reset" else joules + draw(st.floats(0, 900))
        gpus = tuple(
            GpuReading(
                f"GPU {index}", power_w=draw(st.floats(50, 700)), memory_used_bytes=draw(st.integers(0, 80 << 30)),
                foreign=(ForeignProcess(7, "train"),) if kind == "shared" else None,
                utilization_percent=None if kind == "no use" else draw(st.floats(0, 100)),
                energy_j=None if kind == "no energy" else joules * (1 + index),
                energy_at_ns=None if kind == "no energy" else at_ns + draw(st.integers(0, MS)),
            )
            for index in range(2)
        )  # fmt: skip
        found.append(ServerReading(at_ns, None if kind == "unread" else gpus, None))
        at_ns += draw(st.integers(2 * MS, 90 * MS) | st.just(3100 * MS))
    return found


def _measure(
    run: Path, trials: list[list[dict[str, Any]]], paused: bool, readings: list[ServerReading], price: float | None
) -> None:
    """The golden run as an A/B run of one load with these trials on two GPUs, judged and rendered."""
    asked = LOCK.load(run)
    load = {name: value for name, value in asked["load"].items() if name not in ("cells", "prompts")}
    load |= {"trials": len(trials), "request_count": len(trials[0]), "concurrency": [2]}
    load |= {"session_turns_mean": 2, "session_turn_delay_mean": 5.0} if paused else {}
    spec = ExperimentSpec.model_validate({
        **{name: asked[name] for name in ("name", "modes", "topology")},
        "load": load, "order": "abba", "gpu_hour_price": price,
        "gate": {
            "slo": ["time_to_first_token:p50:le:20", "inter_token_latency:avg:le:5", "request_throughput:avg:ge:20"],
            "min_goodput": 10.0, "baseline": "agg", "max_regression": "10%", "max_error_rate": "40%",
        },
    })  # fmt: skip
    write_lock(run, spec, LOCK.read(run, AskedRun).provenance)
    shutil.rmtree(run / "cells")
    recorded = read_recorded(run, spec)
    for place, label in enumerate(spec.labels):
        cell = cell_directory(run, cell_name(label, spec.load.loads[0]))
        for number, lines in enumerate(trials[place:] + trials[:place], 1):
            trial = trial_directory(cell, number)
            trial.mkdir(parents=True)
            (trial / RECORDS_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
            if readings:
                write_readings(trial, readings)
        numbers = range(1, len(trials) + 1)
        target = replace(recorded.target(label), gpu_count=2, gpu_hour_price=price)
        measured = measure_cell(cell, target, spec.load, spec.load.loads[0], numbers)
        CELL_FILE.write(cell, measured.to_json())
    gate.judge(run, spec)
    render(run)


@pytest.mark.slow
@settings(
    max_examples=examples(12), deadline=None, phases=(Phase.explicit, Phase.generate)
)  # one takes a tenth of a second
@given(st.data())
def test_whatever_was_measured_both_compute_the_same_of_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run = Path(shutil.copytree(GOLDEN / "run", tmp_path_factory.mktemp("run") / "run"))
    count = data.draw(st.sampled_from((1, 6, 24)))
    trials = data.draw(st.lists(_requests(count), min_size=1, max_size=3))
    readings, price = data.draw(_readings()), data.draw(st.none() | st.floats(0, 50))
    _measure(run, trials, data.draw(st.booleans()), readings, price)
    comparison = check_run(run)
    assert not comparison.mismatches, comparison.table()
    assert comparison.compared > 500


@given(st.floats(1, 200), st.floats(0.5, 0.9999))
def test_students_distribution_is_scipys(freedom: float, confidence: float) -> None:
    assert student(freedom, confidence) == pytest.approx(float(stdtrit(freedom, (1 + confidence) / 2)), rel=1e-10)
