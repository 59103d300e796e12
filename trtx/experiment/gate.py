"""The gate of a run: what it will be judged by is checked before anything starts, and judged when it has ended.

The baseline is copied into the run directory at its start: a run that is resumed, or judged again, is held against the
same one, whatever became of the file meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trtx.bench import Cell, Load, cell_name, describe, read_cells
from trtx.bench.gate import compare
from trtx.bench.goodput import goodput, judge_goodput, request_bounds
from trtx.bench.judgement import Judgement, Verdict
from trtx.bench.metrics import error_request_count, request_count, uncounted_request_count
from trtx.bench.records import RECORDS_FILE, read_records
from trtx.bench.resolution import check_resolvable
from trtx.bench.sample import Sample
from trtx.bench.slo import judge_error_rate, judge_objective
from trtx.experiment.baseline import Baseline, read_baseline, write_baseline
from trtx.experiment.baselines import Baselines, open_baseline
from trtx.experiment.conditions import (
    Conditions,
    conditions_of,
    differences,
    load_differences,
    refuse_others,
    unchecked,
)
from trtx.experiment.spec import ExperimentSpec
from trtx.experiment.verdict import run_verdict
from trtx.report.forms import BASELINE, CONDITIONS, VERDICT, ComparedWith, Environment, RunVerdict
from trtx.topology import Plan


def planned_loads(spec: ExperimentSpec) -> dict[str, Load]:
    """The load of every cell that is to be measured, by the cell's name."""
    return {cell_name(mode, load.concurrency): load for mode in spec.measured_modes for load in spec.load.loads}


def prepare(run_dir: Path, spec: ExperimentSpec, plans: Mapping[str, Plan], environment: Environment) -> None:
    """Writes what a run is measured under, and the baseline that it will be compared with.

    Raises UsageError for a baseline that is not there, of another model, load or machine, without one of the cells, or
    whose spread is too wide for the limit; and where ``--save-baseline`` names one that must not be replaced.
    """
    gate, conditions = spec.gate, conditions_of(spec, plans, environment)
    CONDITIONS.write(run_dir, conditions)
    baselines = Baselines(Path(gate.baseline_dir))
    if gate.save_baseline is not None:
        baselines.check_can_save(gate.save_baseline)
    if gate.baseline is None or gate.limit is None:
        return
    loads = planned_loads(spec)
    baseline = open_baseline(gate.baseline, baselines, conditions, loads, gate.allow_different)
    found = [*differences(baseline.conditions, conditions), *load_differences(baseline.cells, loads)]
    refuse_others(f"baseline {baseline.name}", found, gate.allow_different)
    check_resolvable(
        baseline.samples, tuple(loads), spec.load.trials, gate.limit, gate.compared,
        max_error_rate=gate.error_rate_limit,
    )  # fmt: skip
    write_baseline(run_dir / BASELINE.file, baseline)


def judge(run_dir: Path, spec: ExperimentSpec) -> RunVerdict:
    """Judges every cell that was to be measured, writes ``verdict.json``, and returns it."""
    gate = spec.gate
    loads = planned_loads(spec)
    cells = {cell.name: cell for cell in read_cells(run_dir)}
    samples = [Sample.of(cells[name]) if name in cells else _unmeasured(name) for name in loads]
    found: list[Judgement] = []
    for sample in samples:
        cell = cells.get(sample.cell)
        found.append(_judge_failures(sample, cell, gate.error_rate_limit))
        if cell is not None and found[-1].verdict is Verdict.PASS and (lacking := _judge_usage(sample)):
            found.append(lacking)
        found += [judge_objective(sample, objective) for objective in gate.objectives]
        if gate.min_goodput is not None:
            bounds = request_bounds(gate.objectives)
            trials = () if cell is None else (run_dir / "cells" / cell.name / one.directory for one in cell.trials)
            goodputs = [goodput(read_records(trial / RECORDS_FILE), bounds) for trial in trials if _has_records(trial)]
            found.append(judge_goodput(sample, goodputs, gate.min_goodput))
    compared = None
    if gate.limit is not None:
        baseline = read_baseline(run_dir / BASELINE.file)
        found += compare(
            baseline.samples, samples, gate.limit, gate.compared, max_error_rate=gate.error_rate_limit
        )  # fmt: skip
    order = list(loads)
    found.sort(key=lambda judgement: order.index(judgement.cell))
    verdict = run_verdict(tuple(cells.values()), found, compared)
    VERDICT.write(run_dir, verdict)
    return verdict


def forget(run_dir: Path) -> None:
    """A run that goes on has no verdict until it has ended again."""
    (run_dir / VERDICT.file).unlink(missing_ok=True)


def _compared(run_dir: Path, baseline: Baseline, loads: Mapping[str, Load]) -> ComparedWith:
    now = CONDITIONS.read(run_dir, Conditions)
    found = [*differences(baseline.conditions, now), *load_differences(baseline.cells, loads)]
    return ComparedWith(
        name=baseline.name,
        run=baseline.run,
        saved_at=baseline.saved_at,
        differences=tuple(map(str, found)),
        unchecked=unchecked(baseline.conditions, now),
    )


def _judge_failures(sample: Sample, cell: Cell | None, limit: float) -> Judgement:
    judged = judge_error_rate(sample, limit)
    if judged.verdict is not Verdict.MISSED or cell is None or cell.figures is None:
        return judged
    failed, succeeded = cell.figures[error_request_count], cell.figures[request_count]
    reason = f"{failed:,} of {failed + succeeded:,} failed: {describe(cell.errors)}; expected {_at_most(limit)}"
    return replace(judged, reason=reason)


def _judge_usage(sample: Sample) -> Judgement | None:
    """Answers without usage, whose tokens nobody counted: what the cell did is not known."""
    uncounted = 0 if sample.figures is None else sample.figures[uncounted_request_count]
    if not uncounted:
        return None
    answers = sample.requests()[0]
    return Judgement(
        cell=sample.cell,
        criterion="uncounted_request_count:avg:le:0",
        verdict=Verdict.NO_VERDICT,
        reason=f"{uncounted:,} of {answers:,} answers carry no usage, so nobody counted their tokens; expected one "
        "each; switch usage on at the server",
        value=uncounted,
        limit=0,
        unit="requests",
    )


def _unmeasured(name: str) -> Sample:
    return Sample(cell=name, device_count=None, figures=None, trials=(), failure="it was not measured")


def _has_records(trial: Path) -> bool:
    return (trial / RECORDS_FILE).exists()


def _at_most(limit: float) -> str:
    return f"at most {limit:g} %" if limit else "none"


def saved(run_dir: Path, spec: ExperimentSpec) -> Path | None:
    """The baseline that ``--save-baseline`` made of a run that has ended; None where it asked for none."""
    name = spec.gate.save_baseline
    return None if name is None else Baselines(Path(spec.gate.baseline_dir)).save(run_dir, name)
