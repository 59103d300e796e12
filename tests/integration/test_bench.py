"""``trtx bench`` whole: real launcher, frontend, workers and aiperf, on the paced engine, whose speed is known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from called import call
from hostile_server import hostile_server
from planted_slowness import causes_of, with_recorded_gpus
from recomputed_run import assert_recomputed

from trtx.bench.cells import CELL, read_cells
from trtx.bench.explain import explain_cell
from trtx.bench.gpu_metrics import GpuNumber
from trtx.bench.metric_types import all_figures
from trtx.bench.readings import read_readings
from trtx.bench.records import RECORDS_FILE, read_trial
from trtx.bench.stages import UNACCOUNTED
from trtx.report import read_run

TTFT_MS, ITL_MS = 30, 10
PACED = ["--engine", "paced", "--set", f"paced_ttft_ms={TTFT_MS}", "--set", f"paced_itl_ms={ITL_MS}"]
UNUSED = "kv_cache_config.host_cache_size"  # which the paced engine does not act on
# Random prompts: aiperf need not tokenize its text of 5 MB, which takes each call 2 s of CPU.
LOAD = [
    "--isl",
    "64",
    "--osl",
    "16",
    "--request-count",
    "12",
    "--warmup-request-count",
    "2",
    "--prompt-corpus",
    "random",
]


def _environment() -> dict[str, str]:
    return {**os.environ, "COLUMNS": "120"}


def _run_dir(parent: Path) -> Path:
    (found,) = parent.iterdir()
    return found


@pytest.fixture(scope="module")
def paced_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    parent = tmp_path_factory.mktemp("runs")
    argv = [sys.executable, "-m", "trtx", "bench", "--mode", "agg,disagg", "--concurrency", "1,4", *PACED, *LOAD]
    argv += ["--set", f"{UNUSED}=1000000000", "--gpu-hour-price", "2.5"]
    done = subprocess.run([*argv, "-o", str(parent)], capture_output=True, text=True, timeout=400, env=_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return _run_dir(parent), done


@pytest.fixture(scope="module")
def rows(paced_run: tuple[Path, subprocess.CompletedProcess[str]]) -> list[dict[str, Any]]:
    summary = json.loads((paced_run[0] / "summary.json").read_text())
    found: list[dict[str, Any]] = summary["rows"]
    return found


def test_the_last_line_is_the_path_of_the_report(paced_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    run_dir, done = paced_run
    assert done.stdout.splitlines()[-1] == str(run_dir / "report.html")
    assert (run_dir / "report.html").stat().st_size > 1_000_000
    assert "are unchanged since each trial ended" in (run_dir / "report.html").read_text()


def test_without_a_gpu_its_metrics_are_unknown_and_the_reason_is_shown(
    paced_run: tuple[Path, subprocess.CompletedProcess[str]], rows: list[dict[str, Any]]
) -> None:
    names = [one.name for one in all_figures() if isinstance(one, GpuNumber)]
    assert len(names) == 10
    assert all(row[prefix + name] is None for row in rows for name in names for prefix in ("", "steady_"))
    run_dir, done = paced_run
    assert "the topology uses no GPU" in done.stdout
    assert "J/out." not in done.stdout and "cost/M" not in done.stdout
    assert yaml.safe_load((run_dir / "run.lock.yaml").read_text())["gpu_hour_price"] == 2.5


def test_both_modes_and_loads_are_measured_without_a_failure(rows: list[dict[str, Any]]) -> None:
    assert [(row["topology"], row["concurrency"]) for row in rows] == [
        ("agg", 1),
        ("agg", 4),
        ("disagg", 1),
        ("disagg", 4),
    ]
    assert {row["status"] for row in rows} == {"ok"}
    assert all((row["request_count"], row["error_request_count"]) == (12, 0) for row in rows)


def test_output_length_is_exact_and_input_length_is_what_was_asked(rows: list[dict[str, Any]]) -> None:
    assert all(row["output_sequence_length"] == 16 for row in rows)
    assert all(abs(row["input_sequence_length"] - 64) <= 2 for row in rows)


def test_measured_latencies_are_never_shorter_than_the_engine_allows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["time_to_first_token_p50"] >= TTFT_MS
        # The first chunk may bring the tokens of two steps, never more than that on average.
        assert row["inter_token_latency_p50"] >= ITL_MS * 14 / 15 * 0.95
        assert row["request_latency_p50"] >= TTFT_MS + 14 * ITL_MS
        assert row["output_token_throughput_per_user"] <= 1000 / ITL_MS * 1.15


def test_every_figure_is_what_aiperfs_records_give(paced_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    assert_recomputed(paced_run[0])


def test_four_users_get_more_tokens_a_second_than_one(rows: list[dict[str, Any]]) -> None:
    throughput = {(row["topology"], row["concurrency"]): row["output_token_throughput"] for row in rows}
    for mode in ("agg", "disagg"):
        assert throughput[mode, 4] > 1.5 * throughput[mode, 1]


def test_modes_are_measured_with_the_same_prompts(paced_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    cells = paced_run[0] / "cells"
    prompts = {
        cell: (cells / cell / "trial-01" / "inputs.json").read_text() for cell in ("agg-c1", "disagg-c1", "agg-c4")
    }
    texts = {cell: _prompts(text) for cell, text in prompts.items()}
    assert texts["agg-c1"] == texts["disagg-c1"]
    assert not texts["agg-c1"] & texts["agg-c4"]


def _prompts(inputs: str) -> set[str]:
    return {payload["messages"][0]["content"] for entry in json.loads(inputs)["data"] for payload in entry["payloads"]}


def test_warm_up_comes_before_what_is_measured(paced_run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    for cell in (paced_run[0] / "cells").iterdir():
        phases = json.loads((cell / "trial-01" / "phase_manifest.json").read_text())["phases"]
        times = {phase["phase_name"]: phase["start_ns"] for phase in phases}
        assert times["warmup"] < times["profiling"]


def test_the_requests_of_each_worker_were_counted_while_they_were_measured(
    paced_run: tuple[Path, subprocess.CompletedProcess[str]], rows: list[dict[str, Any]]
) -> None:
    for cell in read_run(paced_run[0]).rows:
        readings = read_readings(paced_run[0] / "cells" / cell.name / "trial-01")
        assert readings is not None and readings[0].gpus == readings[-1].gpus == ()
        first, last = readings[0].ended_requests, readings[-1].ended_requests
        assert first is not None and last is not None
        counted = {role: sum(last[role].values()) - sum(first[role].values()) for role in last}
        assert counted == dict.fromkeys(["agg"] if cell.topology == "agg" else ["prefill", "decode"], 2 + 12)
    assert not [row for row in rows if "uneven workers" in row["not_checked"]]


def test_the_stages_of_every_request_add_up_to_the_clients_own_time(
    paced_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, _ = paced_run
    cells = read_cells(run_dir)
    explained = [explain_cell(run_dir, cell) for cell in cells]
    assert [one.unknown for one in explained] == [None] * len(cells)
    for one in explained:
        assert len(one.splits) == one.answered
        for split in one.splits:
            assert split.ttft is not None
            accounted = sum(value for stage, value in split.ttft.items() if stage != UNACCOUNTED)
            assert accounted == pytest.approx(split.record.time_to_first_token, rel=0.02)
        for latency in (*one.ttft, *one.itl):
            assert sum(latency.stages.values()) == pytest.approx(latency.value, rel=0.02)
    report = (run_dir / "report.html").read_text()
    assert "Where the time goes" in report and "stages-ttft" in report


def test_a_throttled_gpu_of_recorded_readings_is_the_cause_that_explain_names(
    paced_run: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    why = ["thermal, by hardware"]
    reading = {"name": "GPU 0", "sm_clock_mhz": 1410, "max_sm_clock_mhz": 1980, "clock_reasons": why}
    run_dir = with_recorded_gpus(paced_run[0], tmp_path / "run", [reading])

    assert all("throttled GPU" in causes for causes in causes_of(run_dir).values())


def test_the_run_directory_holds_every_file_of_its_contract(
    paced_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir = paced_run[0]
    for name in (
        "plan.json",
        "run.lock.yaml",
        "journal.jsonl",
        "summary.json",
        "summary.csv",
        "summary.md",
    ):
        assert (run_dir / name).stat().st_size > 0, name
    for cell in ("agg-c1", "agg-c4", "disagg-c1", "disagg-c4"):
        assert (run_dir / "cells" / cell / "trial-01" / "profile_export_aiperf.json").exists()
        assert json.loads((run_dir / "cells" / cell / "cell.json").read_text())["schema_version"] == CELL.version
    suite = ElementTree.parse(run_dir / "junit.xml").getroot()
    rows = json.loads((run_dir / "summary.json").read_text())["rows"]
    invalid = sum(row["validity"] == "INVALID" for row in rows)  # as on a machine with too much else to do
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("8", "0", str(invalid))
    assert list(run_dir.glob("*/serve/logs/*.log"))


def test_what_the_engine_does_not_act_on_is_named_in_all_that_a_run_leaves(
    paced_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run_dir, done = paced_run
    assert done.stderr.count(f"engine paced does not act on {UNUSED} (--set)") == 1
    lock = yaml.safe_load((run_dir / "run.lock.yaml").read_text())
    for label, roles in {"agg": ("agg",), "disagg": ("prefill", "decode")}.items():
        measured = lock["provenance"]["measured"][label]
        for role in roles:
            assert UNUSED in [one["field"] for one in measured["left_out"][role] if one["typed"]]
            assert "kv_cache_config" not in measured["engine_configs"][role]
            (config,) = run_dir.glob(f"{label}/serve/configs/{role}.yaml")
            assert "host_cache_size" not in config.read_text()
    conditions = json.loads((run_dir / "conditions.json").read_text())
    assert conditions["topology"]["agg"]["left_out"]["agg"][UNUSED] == 1000000000
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["conditions"]["Without effect on engine paced"] == f"{UNUSED} 1000000000 (--set)"
    for name in ("summary.md", "report.html"):
        assert f"{UNUSED} 1000000000 (--set)" in (run_dir / name).read_text()


OF_ONE_START = {"Command", "Started", "Load average before", "Time to load"}


@pytest.mark.proof  # a run of its own
def test_a_cell_is_made_again_from_a_copy_of_the_lock_alone(
    paced_run: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """One of the four: a lock says of each mode and each cell what it needs, so taking the others out leaves a lock."""
    lock = yaml.safe_load((paced_run[0] / "run.lock.yaml").read_text())
    lock["modes"], lock["topologies"], lock["load"]["concurrency"] = ["agg"], ["agg"], [4]
    lock["load"]["cells"] = [cell for cell in lock["load"]["cells"] if cell["concurrency"] == 4]
    agg = lock["provenance"]["measured"].pop("agg")
    lock["provenance"]["measured"] = {"agg": {**agg, "aiperf": {"agg-c4": agg["aiperf"]["agg-c4"]}}}
    copy = tmp_path / "of-a-job.yaml"
    copy.write_text(yaml.safe_dump(lock))

    done = call("bench", "reproduce", copy.name, "--exact", "--json", "-o", "again", directory=tmp_path)
    assert done.code == 0, done.out + done.err
    assert done.err.startswith("nothing differs\n")
    runs = [paced_run[0], _run_dir(tmp_path / "again")]
    assert json.loads(done.out)["run_dir"] == str(runs[1])
    prompts = [(run_dir / "cells/agg-c4/trial-01/inputs.json").read_bytes() for run_dir in runs]
    assert prompts[0] == prompts[1] and len(prompts[0]) > 1000
    views = [read_run(run_dir) for run_dir in runs]
    cells = [{row.name: (row.status, row.cell and row.cell.load) for row in view.rows} for view in views]
    assert cells[1] == {"agg-c4": cells[0]["agg-c4"]} and cells[1]["agg-c4"][0] == "ok"
    conditions = [{one.name: one.value for one in view.conditions if one.name not in OF_ONE_START} for view in views]
    differing = {name for name in conditions[0] if conditions[0][name] != conditions[1].get(name)}
    of_all_four_cells = {"Requests", "Warm-up", "ISL / OSL", "Without effect on engine paced, of recipes"}
    assert differing <= of_all_four_cells and "Model's files" in conditions[1]
    again = yaml.safe_load((runs[1] / "run.lock.yaml").read_text())
    assert {**again, "provenance": None} == {**lock, "provenance": None}


@pytest.mark.proof  # a run for one property of aiperf's, held to times
def test_a_trace_is_sent_by_its_own_times(tmp_path: Path) -> None:
    """Of hash_ids, whose prompts aiperf makes in processes that read the tokenizer offline."""
    times_ms = [1000 + 250 * n for n in range(12)]
    trace = tmp_path / "trace.jsonl"
    records = [{"timestamp": at, "input_length": 30, "output_length": 8, "hash_ids": [at]} for at in times_ms]
    trace.write_text("".join(json.dumps(record) + "\n" for record in records))
    parent = tmp_path / "runs"
    done = call("bench", *PACED, "--input-file", str(trace), "--fixed-schedule", "-o", str(parent))
    assert done.code == 0, done.out + done.err
    measured = read_trial(_run_dir(parent) / "cells" / "agg-trace" / "trial-01" / RECORDS_FILE).measured
    starts = sorted(record.start_ns for record in measured)
    assert len(starts) == len(times_ms)
    # Half: on a machine with too much to do the first is sent late, and the others are not.
    lasted_ms = (starts[-1] - starts[0]) / 1e6
    assert lasted_ms >= 0.5 * (times_ms[-1] - times_ms[0]), "a load that does not wait sends them at once"


@pytest.mark.proof  # both cores are taken from all other tests
def test_a_busy_process_beside_a_run_is_told_of_its_cells_and_an_idle_machine_was_looked_at(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    assert all("foreign CPU use" not in row["not_checked"] for row in rows)
    argv = [sys.executable, "-m", "trtx", "bench", "--concurrency", "1", *PACED, *LOAD, "-o", str(tmp_path / "runs")]
    spin = [sys.executable, "-c", "while True: pass"]
    with ExitStack() as cleanup:
        busy = [cleanup.enter_context(subprocess.Popen(spin)) for _ in os.sched_getaffinity(0)]
        for process in busy:
            cleanup.callback(process.kill)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=400, env=_environment())
    assert done.returncode in (0, 1, 3), done.stdout + done.stderr  # as long as it measured something
    (row,) = json.loads((_run_dir(tmp_path / "runs") / "summary.json").read_text())["rows"]
    assert row["validity"] != "VALID"
    assert "foreign CPU use: processes outside the run used" in row["validity_reasons"]


@pytest.mark.proof  # a run of its own
def test_an_aiperf_that_measures_nothing_is_exit_5_with_its_log(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer_config.json").write_text("{}")  # no tokenizer.json: aiperf can't load it
    with hostile_server() as url:
        attach = ["--url", url, "--tokenizer", str(tokenizer)]
        done = call("bench", *attach, "--concurrency", "2", *LOAD, "-o", str(tmp_path / "runs"))
    assert done.code == 5, done.out + done.err
    assert "aiperf exited 1 and measured nothing" in done.err and "aiperf-console.log" in done.err
    assert (_run_dir(tmp_path / "runs") / "report.html").exists()


@pytest.mark.proof  # a run of its own; test_serve_live.py interrupts a topology
def test_ctrl_c_ends_aiperf_and_the_topology_and_renders_what_there_is(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "trtx", "bench", "--concurrency", "1,4", *PACED, "--isl", "64", "--osl", "16"]
    process = subprocess.Popen(
        [*argv, "--request-count", "400", "--prompt-corpus", "random", "-o", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment(), start_new_session=True,
    )  # fmt: skip
    try:
        _until(lambda: any(tmp_path.glob("*/cells/agg-c1/trial-01/profile_export.jsonl")), process)
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("aiperf" in " ".join(child.cmdline()) for child in family)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 130, said
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    run_dir = _run_dir(tmp_path)
    assert "ended early" in (run_dir / "summary.md").read_text()
    assert (run_dir / "report.html").exists()


def _until(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
