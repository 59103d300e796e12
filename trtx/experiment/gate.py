"""The gate of a run: its criteria are checked before anything starts and applied when the run has ended.

The baseline is copied into the run directory at the start, so that a run that is resumed or judged again uses the same
baseline even if the original file has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from trtx.bench import Cell, Load, cell_name
from trtx.bench.intact import as_kept, read_kept
from trtx.bench.judge.goodput import goodput, request_bounds
from trtx.bench.judge.judgement import CheckResult
from trtx.bench.judge.regression import GateLimit
from trtx.bench.judge.resolution import check_resolvable
from trtx.bench.phases import Phases, phases_of
from trtx.bench.records import RECORDS_FILE, read_records
from trtx.experiment.baselines.baseline import Baseline, check_window, read_baseline, records_unchecked, write_baseline
from trtx.experiment.baselines.conditions import (
    Conditions,
    conditions_of,
    differences,
    load_differences,
    refuse_others,
    unchecked,
)
from trtx.experiment.baselines.store import Baselines, is_picked, open_baseline, open_measured
from trtx.experiment.bench.spec import ExperimentSpec
from trtx.experiment.bench.verdict import judge_cells, run_verdict
from trtx.experiment.scores import judge_scores, partners, score_differences, scores_of_run
from trtx.runs.forms import BASELINE, CONDITIONS, VERDICT, ComparedWith, Provenance, RunVerdict
from trtx.topology import Plan


def planned_loads(spec: ExperimentSpec) -> dict[str, Load]:
    """The load of every planned cell, by cell name."""
    return {cell_name(label, load): load for label in spec.labels for load in spec.load.loads}


def prepare(run_dir: Path, spec: ExperimentSpec, plans: Mapping[str, Plan], provenance: Provenance) -> None:
    """Writes the run's conditions and the baseline with which it will be compared.

    Raises UsageError like :func:`check_can_save` and :func:`baseline_of`.
    """
    conditions = conditions_of(spec, plans, provenance)
    CONDITIONS.write(run_dir, conditions)
    check_can_save(spec)
    if takes_baseline(spec):
        write_baseline(run_dir / BASELINE.file, baseline_of(spec, conditions))


def check_can_save(spec: ExperimentSpec) -> None:
    """Raises UsageError if ``--save-baseline`` names a promoted baseline, or if baselines can't be written."""
    _check_name(spec)
    if spec.gate.save_baseline is not None:
        Baselines(Path(spec.gate.baseline_dir)).check_can_write()


def _check_name(spec: ExperimentSpec) -> None:
    if spec.gate.save_baseline is not None:
        Baselines(Path(spec.gate.baseline_dir)).check_can_save(spec.gate.save_baseline)


def takes_baseline(spec: ExperimentSpec) -> bool:
    """Whether the run is compared with another run, and not only with one of its own topologies."""
    return spec.gate.limit is not None and _pairs(spec) is None


def baseline_of(spec: ExperimentSpec, conditions: Conditions) -> Baseline:
    """The baseline for a run under these conditions.

    Raises UsageError if the baseline doesn't exist, has another model, load or machine, lacks a cell, or has too much
    spread for the limit.
    """
    gate, loads = spec.gate, planned_loads(spec)
    if gate.baseline is None or gate.limit is None:
        raise ValueError("nothing is compared: ask takes_baseline() first")
    baselines = Baselines(Path(gate.baseline_dir))
    baseline = open_baseline(gate.baseline, baselines, conditions, loads, gate.allow_different)
    found = [*differences(baseline.conditions, conditions), *load_differences(baseline.cells, loads)]
    refuse_others(f"baseline {baseline.name}", found, gate.allow_different)
    _check_samples(spec, gate.limit, baseline)
    return baseline


def check_elsewhere(spec: ExperimentSpec) -> None:
    """Checks the gate of a run that will happen on another machine, as far as that is possible here.

    Not checked are that machine's conditions, its permissions, and a baseline that is selected by conditions. Raises
    UsageError like :func:`check_can_save` and :func:`baseline_of`.
    """
    _check_name(spec)
    gate = spec.gate
    if not takes_baseline(spec) or gate.baseline is None or gate.limit is None or is_picked(gate.baseline):
        return
    baseline = open_measured(gate.baseline, Baselines(Path(gate.baseline_dir)))
    allowed = [key for key in gate.allow_different if key.partition(".")[0] == "load"]
    refuse_others(f"baseline {baseline.name}", load_differences(baseline.cells, planned_loads(spec)), allowed)
    _check_samples(spec, gate.limit, baseline)


def _check_samples(spec: ExperimentSpec, limit: GateLimit, baseline: Baseline) -> None:
    gate = spec.gate
    check_window(baseline, gate.window)
    check_resolvable(
        baseline.samples(gate.window), tuple(planned_loads(spec)), spec.load.trials, limit, gate.compared,
        max_error_rate=gate.error_rate_limit,
    )  # fmt: skip


def judge(run_dir: Path, spec: ExperimentSpec) -> RunVerdict:
    """Judges every planned cell and every score, writes ``verdict.json``, and returns the verdict."""
    loads = planned_loads(spec)
    cells = {name: as_kept(*one) for name, one in read_kept(run_dir).items()}
    pairs = _pairs(spec)
    baseline = read_baseline(run_dir / BASELINE.file) if takes_baseline(spec) else None
    judgements = judge_cells(
        spec.gate, tuple(loads), cells,
        goodputs=_goodputs(run_dir, spec, cells.values()),
        baseline=() if baseline is None else baseline.samples(spec.gate.window),
        pairs=pairs,
    )  # fmt: skip
    compared = None if baseline is None else compared_with(spec, baseline, CONDITIONS.read(run_dir, Conditions))
    judgements = (*judgements, *_judge_scores(run_dir, spec, baseline))
    verdict = run_verdict(tuple(cells.values()), judgements, compared, spec.gate.window)
    VERDICT.write(run_dir, verdict)
    return verdict


def _judge_scores(run_dir: Path, spec: ExperimentSpec, baseline: Baseline | None) -> list[CheckResult]:
    """Judges scores against those of the baseline or, in an A/B run, of the baseline variant."""
    if spec.eval is None:
        return []
    if baseline is not None:
        others = partners(spec.labels, baseline.scores)
        return judge_scores(run_dir, spec.labels, spec.eval, others, whose=" of the baseline")
    scored = {one.topology: one for one in scores_of_run(run_dir)}
    arm = scored.get(spec.gate.baseline or "") if _pairs(spec) is not None else None
    others = {} if arm is None else {label: arm for label in spec.labels if label != arm.topology}
    return judge_scores(run_dir, spec.labels, spec.eval, others)


def _pairs(spec: ExperimentSpec) -> dict[str, str] | None:
    """For an A/B run gated by one of its own topologies: each cell of the others, with the baseline's cell.

    None if the baseline is another run.
    """
    arm = spec.gate.baseline
    if spec.order != "abba" or arm not in spec.labels:
        return None
    others = (label for label in spec.labels if label != arm)
    return {cell_name(label, load): cell_name(arm, load) for label in others for load in spec.load.loads}


def compared_with(spec: ExperimentSpec, baseline: Baseline, now: Conditions) -> ComparedWith:
    """The baseline for the verdict, with its differences from a run under the conditions ``now``."""
    found = [*differences(baseline.conditions, now), *load_differences(baseline.cells, planned_loads(spec))]
    return ComparedWith(
        name=baseline.name,
        run=baseline.run,
        saved_at=baseline.saved_at,
        differences=(*map(str, found), *_other_questions(spec, baseline)),
        unchecked=unchecked(baseline.conditions, now),
        records_unchecked=records_unchecked(baseline),
    )


def _other_questions(spec: ExperimentSpec, baseline: Baseline) -> tuple[str, ...]:
    """Differences that conditions don't contain.

    These are missing scores on one side and, for a baseline saved before conditions included the scoring, differences
    derived from its scores.
    """
    if spec.eval is None:
        return ("it has scores but this run has none, so they are not compared",) if baseline.scores else ()
    if not baseline.scores:
        return ("it has no scores, so the scores of this run are not compared",)
    if baseline.conditions.eval:
        return ()
    return tuple(f"eval.{one}" for one in score_differences(spec.eval, baseline.scores))


def _goodputs(run_dir: Path, spec: ExperimentSpec, cells: Iterable[Cell]) -> dict[str, list[float | None]]:
    """The goodput of each trial with a result, by cell; empty if no minimum goodput is set."""
    gate = spec.gate
    if gate.min_goodput is None:
        return {}
    bounds = request_bounds(gate.objectives)
    found: dict[str, list[float | None]] = {}
    for cell in cells:
        trials = [run_dir / "cells" / cell.name / trial.directory for trial in cell.trials if trial.figures]
        each = [read_records(trial / RECORDS_FILE) for trial in trials]
        if gate.window == "whole":
            found[cell.name] = [goodput(records, bounds) for records in each]
            continue
        phases = [phases_of(records, spec.load.held_concurrency(cell.load)) for records in each]
        found[cell.name] = [
            goodput(records, bounds, one.steady) if isinstance(one, Phases) else None
            for records, one in zip(each, phases, strict=True)
        ]
    return found


def saved(run_dir: Path, spec: ExperimentSpec) -> Path | None:
    """The baseline saved from a finished run by ``--save-baseline``; None without that option."""
    name = spec.gate.save_baseline
    return None if name is None else Baselines(Path(spec.gate.baseline_dir)).save(run_dir, name)
