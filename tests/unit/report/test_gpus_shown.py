"""GPU use, energy and cost of a run as a reader sees them: the terminal at 80 columns, summary.md and the page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tests.unit.report.shown_forms import rendered
from trtx.bench import Cell, cell_directory, cell_name, trial_directory
from trtx.bench.cells import CELL, measure_cell
from trtx.bench.gpu_metrics import GpuNumber
from trtx.bench.judge.judgement import Verdict
from trtx.bench.judge.regression import GateLimit, compare, parse_metrics
from trtx.bench.judge.sample import CellSample
from trtx.bench.judge.slo import judge_objective, parse_objective
from trtx.bench.metric_types import all_figures
from trtx.bench.readings import ForeignProcess, GpuReading, ServerReading, write_readings
from trtx.bench.records import RECORDS_FILE, read_trial
from trtx.experiment.bench.resumption import read_recorded
from trtx.experiment.directory import read_lock

pytestmark = pytest.mark.slow

SECOND = 10**9
EVERY_NS = SECOND // 5
HIDDEN = ("J/out.", "cost/M", 'aria-label="GPUs"', "## GPUs")


def _reading(at_ns: int, start_ns: int, foreign: tuple[ForeignProcess, ...]) -> ServerReading:
    """Two GPUs of 600 W each."""
    joules = 1e8 + 600 * (at_ns - start_ns) / SECOND
    gpu = GpuReading(
        "GPU 0", power_w=600.0, memory_used_bytes=70 << 30, foreign=foreign, utilization_percent=97.0,
        energy_j=joules, energy_at_ns=at_ns,
    )  # fmt: skip
    return ServerReading(at_ns, (gpu, replace(gpu, name="GPU 1")), None)


def _measure(
    run: Path, price: float | None, gpu_count: int | None, has_readings: Callable[[str], bool], shared: str = ""
) -> dict[str, Cell]:
    """The golden run on ``gpu_count`` GPUs, with readings of the cells that ``has_readings`` names."""
    spec = read_lock(run)
    recorded, found = read_recorded(run, spec), {}
    for label, load in product(spec.labels, spec.load.loads):
        name = cell_name(label, load)
        directory = cell_directory(run, name)
        trial = trial_directory(directory, 1)
        measured = read_trial(trial / RECORDS_FILE).measured
        start_ns, end_ns = min(one.start_ns for one in measured), max(one.end_ns for one in measured)
        foreign = (ForeignProcess(71, "train"),) if name == shared else ()
        if has_readings(name):
            times = range(start_ns - EVERY_NS, end_ns + 2 * EVERY_NS, EVERY_NS)
            write_readings(trial, [_reading(at_ns, start_ns, foreign) for at_ns in times])
        target = replace(recorded.target(label), gpu_count=gpu_count, gpu_hour_price=price)
        found[name] = measure_cell(directory, target, spec.load, load, (1,), restarted=())
        CELL.write(directory, found[name].to_json())
    return found


def test_every_form_has_the_steady_part_and_a_reason_for_each_dash(golden_run: Path) -> None:
    cells = _measure(golden_run, 2.5, 2, lambda name: name != "disagg-c1", shared="disagg-c2")
    terminal, markdown, page = rendered(golden_run)
    assert max(map(len, terminal.splitlines())) <= 80
    steady = cells["agg-c1"].steady
    assert steady is not None and steady.stored["gpu_power"] == pytest.approx(1200)
    rows = {line.split()[0]: line.split()[1:] for line in terminal.splitlines() if re.match(r"(dis)?agg-c\d ", line)}
    assert rows["agg-c1"][:5] == ["97.0", "97.0", "1,200", "1,200", "70.0"]
    assert rows["disagg-c1"][:7] == rows["disagg-c2"][:7] == ["–"] * 7
    assert all(re.fullmatch(r"[\d.]+", cost) for row in rows.values() for cost in row[7:])  # needs no reading
    for text in (terminal, markdown, page):
        plain = " ".join(text.split())
        assert "disagg-c1: no GPU was read; trtx reads the GPUs of the topologies that it serves" in plain
        assert "disagg-c2: train (pid 71) outside of the topology was on GPU 0, and its share is not known" in plain
    assert "| agg-c1 | 97.0 | 97.0 | 1,200 | 1,200 | 70.0 |" in markdown
    section = page[page.index('aria-label="GPUs"') :]
    assert "J/token" in section and "W/GPU" in section and "1,200" in section
    assert "Price of a GPU hour" in page and "| Price of a GPU hour | 2.5 |" in markdown


def test_a_token_costs_what_energy_and_time_of_the_steady_part_give(golden_run: Path) -> None:
    cells = _measure(golden_run, 2.5, 2, lambda name: True)
    for cell in cells.values():
        assert cell.steady is not None
        found = cell.steady.stored
        rate = found["output_token_throughput"]
        assert found["energy_per_output_token"] == pytest.approx(1200 / rate)
        assert found["cost_per_million_output_tokens"] == pytest.approx(1e6 * 2 * 2.5 / 3600 / rate)
        assert found["energy_per_token"] / found["energy_per_output_token"] == pytest.approx(
            found["cost_per_million_tokens"] / found["cost_per_million_output_tokens"]
        )


@pytest.mark.parametrize("gpu_count", [0, None], ids=["no GPU", "attached"])
def test_a_run_without_gpus_and_price_shows_nothing_of_them(golden_run: Path, gpu_count: int | None) -> None:
    cells = _measure(golden_run, None, gpu_count, lambda name: False)
    assert not any(text in shown for shown in rendered(golden_run) for text in HIDDEN)
    assert all(cell.gpu_reasons for cell in cells.values())  # in cell.json


@pytest.mark.parametrize(
    ("gpu_count", "reason"),
    [(0, "the topology uses no GPU"), (None, "the cost is not known, because the number of GPUs is not known")],
)
def test_a_price_without_a_number_of_gpus_is_answered_with_the_reason(
    golden_run: Path, gpu_count: int | None, reason: str
) -> None:
    _measure(golden_run, 2.5, gpu_count, lambda name: False)
    for text in rendered(golden_run):
        plain = " ".join(text.split())
        assert f"all cells: {reason}" in plain and "J/out." not in plain
    row = json.loads((golden_run / "summary.json").read_text())["rows"][0]
    assert {row[one.name] for one in all_figures() if isinstance(one, GpuNumber)} == {None}


def test_a_gate_judges_energy_and_cost_like_any_metric(golden_run: Path) -> None:
    cell = _measure(golden_run, 2.5, 2, lambda name: True)["agg-c2"]
    sample = replace(CellSample.of(cell, "steady"), steady_trials=(cell.steady,) * 3, trials=(cell.figures,) * 3)
    metrics = parse_metrics(["energy_per_output_token", "cost_per_million_tokens:avg", "gpu_utilization", "gpu_power"])
    judged = compare([sample], [sample], GateLimit(5.0), metrics)
    assert [one.verdict for one in judged] == [Verdict.PASS] * 4
    dearer = {**cell.steady.stored, "energy_per_output_token": 9.0} if cell.steady else {}
    worse = replace(
        sample, steady=replace(cell.steady, stored=dearer), steady_trials=(replace(cell.steady, stored=dearer),) * 3
    )  # type: ignore[type-var]
    assert compare([sample], [worse], GateLimit(5.0), metrics[:1])[0].verdict is Verdict.REGRESSED
    bound = parse_objective("gpu_power_peak:max:le:1199")
    assert judge_objective(sample, bound).verdict is Verdict.MISSED


def test_a_gate_gives_no_verdict_on_gpus_that_were_not_read(golden_run: Path) -> None:
    cells = _measure(golden_run, None, 2, lambda name: name == "agg-c1")
    read, unread = (CellSample.of(cells[name], "steady") for name in ("agg-c1", "agg-c2"))
    metrics = parse_metrics(["energy_per_token", "gpu_power_per_gpu"])
    for judged in compare([read], [replace(unread, cell=read.cell)], GateLimit(5.0), metrics):
        assert judged.verdict is Verdict.NO_VERDICT and judged.reason.startswith("no GPU was read; trtx reads")
    bound = judge_objective(unread, parse_objective("energy_per_token:avg:le:5"))
    assert bound.verdict is Verdict.NO_VERDICT and bound.reason.startswith("no GPU was read")
    cost = judge_objective(read, parse_objective("cost_per_million_tokens:avg:le:5"))
    assert cost.verdict is Verdict.NO_VERDICT and "--gpu-hour-price" in cost.reason
