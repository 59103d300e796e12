"""A/B runs: two topologies alternate on the same GPUs, each restarted in every block, and are compared.

The blocks form pairs, in which effects that slow both sides cancel out, so fewer trials are needed than with two
independent runs.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from trtx.bench import Load, cell_name, read_journal
from trtx.bench.cells import CELL
from trtx.bench.draft_metrics import ACCEPTANCE
from trtx.bench.intact import as_kept, read_kept
from trtx.bench.journal import TrialEnded
from trtx.bench.judge.regression import measured_ratio
from trtx.bench.judge.sample import MetricColumn
from trtx.config.strict_yaml import read_yaml
from trtx.config.wording import quoted, shown
from trtx.errors import UsageError
from trtx.experiment.baselines.comparison import judged, measured
from trtx.experiment.baselines.conditions import Conditions, differences, model_of, unchecked
from trtx.experiment.bench.spec import ExperimentSpec
from trtx.experiment.bench.sweep_file import load_sweep
from trtx.experiment.bench.verdict import sample_of
from trtx.experiment.gate_spec import GateSpec
from trtx.experiment.scores import compare_scores, scores_of_run
from trtx.runs.forms import (
    COMPARISON,
    CONDITIONS,
    LOCK,
    AskedRun,
    ComparedArms,
    ComparedMetric,
    Comparison,
    MeasuredStart,
    RunVerdict,
    condition_text,
)
from trtx.stats.intervals import CONFIDENCE, per_interval


def ab_spec(a: Path, b: Path, rounds: int, gate: dict[str, Any]) -> ExperimentSpec:
    """Combines two sweep files, with one topology each and the same load, into one run.

    ``gate`` has the form of a sweep file's gate and judges B against A. Raises UsageError that names the file and the
    error.
    """
    if a.stem == b.stem:
        raise UsageError(
            f"{shown(a)} and {shown(b)} are both called {quoted(a.stem)}, but the files' names are the names of the "
            "topologies; rename one of them, or copy it for an A/A run"
        )
    for path in (a, b):
        _refuse_another_run(path)
    gate = {**gate, "baseline": a.stem} if gate.get("max_regression") else gate
    specs = {path.stem: load_sweep(path, {"gate": gate}) for path in (a, b)}
    gate = _gate_of(a, b, *(spec.gate for spec in specs.values()))
    for path, spec in zip((a, b), specs.values(), strict=True):
        if len(spec.topologies) != 1:
            labels = ", ".join(spec.labels) or "none, because it attaches"
            raise UsageError(f"{shown(path)} has the topologies {labels}; expected exactly one")
    loads = [spec.load.model_dump(mode="json") for spec in specs.values()]
    if differing := [name for name in loads[0] if loads[0][name] != loads[1][name] and name != "trials"]:
        name = differing[0]
        raise UsageError(
            f"load.{name} is {loads[0][name]} in {shown(a)} and {loads[1][name]} in {shown(b)}; use the same "
            "load in both"
        )
    first, second = (spec.eval for spec in specs.values())
    if first != second:
        raise UsageError(f"eval differs between {shown(a)} and {shown(b)}; use the same in both, or in neither")
    price, other = (spec.gpu_hour_price for spec in specs.values())
    if price != other:
        has, lacks = ("not given" if one is None else f"{one:.10g}" for one in (price, other))
        raise UsageError(
            f"gpu_hour_price is {has} in {shown(a)} and {lacks} in {shown(b)}; both run on the same GPUs, so use the "
            "same price in both"
        )
    if rounds < 2 and gate.get("max_regression"):
        raise UsageError(
            f"--max-regression {gate['max_regression']}: one round gives no interval; use --rounds 2 or more, such as 5"
        )
    return load_sweep(
        None,
        {
            "name": f"ab-{a.stem}-{b.stem}",
            "arms": {
                label: spec.topologies[0].spec.model_dump(mode="json", exclude_unset=True)
                for label, spec in specs.items()
            },
            "order": "abba",
            "load": {**_as_given(specs[a.stem]), "trials": rounds},
            "gate": gate,
            **({} if price is None else {"gpu_hour_price": price}),
            **({} if first is None else {"eval": first.model_dump(mode="json", exclude_unset=True)}),
        },
    )


def _refuse_another_run(path: Path) -> None:
    document = read_yaml(path, "sweep file", "a YAML file with keys such as topology and load")
    gate = document.get("gate") if isinstance(document, dict) else None
    if isinstance(gate, dict) and (other := [name for name in _OF_ANOTHER_RUN if name in gate]):
        raise UsageError(
            f"gate.{other[0]} of {shown(path)} belongs to a comparison with another run, but an A/B run compares B "
            "with A; leave it out, and use --max-regression"
        )


def _gate_of(a: Path, b: Path, first: GateSpec, second: GateSpec) -> dict[str, Any]:
    """The gate that both files specify, with options applied. Raises UsageError if the files differ."""
    gates = [gate.model_dump(mode="json", exclude_unset=True) for gate in (first, second)]
    for name in dict.fromkeys((*gates[0], *gates[1])):
        if gates[0].get(name) != gates[1].get(name):
            has, lacks = (condition_text(gate[name]) if name in gate else "not there" for gate in gates)
            raise UsageError(
                f"gate.{name} is {has} in {shown(a)} and {lacks} in {shown(b)}; use the same gate in "
                "both, or in neither"
            )
    return gates[0]


_OF_ANOTHER_RUN = ("baseline", "max_regression", "allow_different", "baseline_dir", "save_baseline")


def _as_given(spec: ExperimentSpec) -> dict[str, Any]:
    return spec.load.model_dump(mode="json", exclude_unset=True)


def keep_comparison(run_dir: Path, spec: ExperimentSpec, verdict: RunVerdict | None) -> None:
    """Writes ``comparison.json`` for an A/B run with at least one cell. Other runs have no such file.

    ``verdict``: of a run that has ended; None for a run that ended early, which has only the measurements so far.
    """
    if spec.order == "abba" and len(spec.labels) > 1 and any((run_dir / "cells").glob(f"*/{CELL.file}")):
        COMPARISON.write(run_dir, compare_arms(run_dir, spec, verdict))


def compare_arms(run_dir: Path, spec: ExperimentSpec, verdict: RunVerdict | None) -> ComparedArms:
    """Compares each topology of an A/B run, block by block, with the gate's baseline or with the first topology.

    All intervals, including those of the gate, hold together with 95 % (Bonferroni). Where a topology speculates, its
    acceptance is shown beside the gate's metrics and is not judged.
    """
    models = LOCK.read(run_dir, AskedRun).provenance.measured
    arm = spec.gate.baseline if spec.gate.baseline in spec.labels else spec.labels[0]
    others = [label for label in spec.labels if label != arm]
    cells = {name: as_kept(*one) for name, one in read_kept(run_dir).items()}
    conditions = CONDITIONS.read(run_dir, Conditions)
    found = {(one.cell, one.criterion): one for one in (verdict.judgements if verdict else ())}

    def columns(label: str, load: Load) -> list[MetricColumn]:
        """The gate's metrics, and those of speculation that one of the two topologies has."""
        samples = [sample_of(cells, cell_name(of, load), spec.gate.window) for of in (arm, label)]
        accepted = [MetricColumn(metric, None) for metric in ACCEPTANCE]
        known = [column for column in accepted if any(sample.value(column) is not None for sample in samples)]
        return [*spec.gate.compared, *(column for column in known if column not in spec.gate.compared)]

    asked = {label: [(load, column) for load in spec.load.loads for column in columns(label, load)] for label in others}
    confidence = per_interval(CONFIDENCE, sum(map(len, asked.values())))

    def compared(label: str, load: Load, metric: MetricColumn) -> ComparedMetric:
        baseline, candidate = (sample_of(cells, cell_name(of, load), spec.gate.window) for of in (arm, label))
        rounds = tuple(zip_longest(baseline.values(metric), candidate.values(metric)))
        judgement = found.get((candidate.cell, metric.name))
        if judgement is not None and spec.gate.limit is not None:
            return judged(load.label, metric, (baseline, candidate), judgement, spec.gate.limit, rounds=rounds)
        ratio = measured_ratio(
            baseline, candidate, metric,
            design="paired", max_error_rate=spec.gate.error_rate_limit, confidence=confidence,
        )  # fmt: skip
        return measured(load.label, metric, (baseline, candidate), ratio, rounds=rounds)

    scored = {one.topology: one for one in scores_of_run(run_dir)}
    max_drop = spec.eval.max_drop if spec.eval and verdict and spec.gate.limit is not None else None
    comparisons = []
    for label in others:
        one, other = (
            replace(conditions, model=model_of(models[of]), topology=conditions.topology.get(of, {}))
            for of in (arm, label)
        )
        metrics = tuple(compared(label, load, metric) for load, metric in asked[label])
        both = [scored[of] for of in (arm, label) if of in scored]
        scores = compare_scores(both[1:], {label: both[0]}, max_drop) if len(both) > 1 else ()
        comparisons.append(
            Comparison(arm, label, differences(one, other), unchecked(one, other), metrics, spec.gate.window, scores)
        )
    return ComparedArms(_starts(run_dir, spec), tuple(comparisons))


def _starts(run_dir: Path, spec: ExperimentSpec) -> tuple[MeasuredStart, ...]:
    """The measured starts from the journal. A resumed run measures the missing trials in its own order."""
    topologies = {cell_name(label, load): label for label in spec.labels for load in spec.load.loads}
    ended = [one for one in read_journal(run_dir) if isinstance(one, TrialEnded) and one.cell in topologies]
    last = {(one.cell, one.trial): place for place, one in enumerate(ended)}  # a repeated trial counts once
    starts = [MeasuredStart(topologies[cell], trial) for cell, trial in sorted(last, key=last.__getitem__)]
    return tuple(dict.fromkeys(starts))
