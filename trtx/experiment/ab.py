"""An A/B run: two topologies in turn on the same GPUs, each started anew in every round, and what one is to the other.

Rounds are pairs: what slows both cancels out, so it takes fewer of them than of runs that know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtx.bench.gate import DEFAULT_METRICS
from trtx.bench.sample import Metric
from trtx.config.wording import quoted, shown
from trtx.errors import UsageError
from trtx.experiment.baseline import Baseline, of_run
from trtx.experiment.comparison import Comparison, compare_measured
from trtx.experiment.directory import read_lock
from trtx.experiment.spec import ExperimentSpec, load_sweep


def ab_spec(a: Path, b: Path, rounds: int, gate: dict[str, Any]) -> ExperimentSpec:
    """One run of two sweep files that have one topology each, and the same load. ``gate``: as a sweep would say it, of
    B against A. Raises UsageError naming the file and what is wrong with it."""
    if a.stem == b.stem:
        raise UsageError(
            f"{shown(a)} and {shown(b)} are both called {quoted(a.stem)}; give the files names that differ"
        )
    specs = {path.stem: load_sweep(path, {}) for path in (a, b)}
    for path, spec in zip((a, b), specs.values(), strict=True):
        if len(spec.topologies) != 1:
            told = ", ".join(spec.labels) or "none, as it attaches"
            raise UsageError(f"{shown(path)} has the topologies {told}; expected one, which A and B are one each of")
    loads = [spec.load.model_dump(mode="json") for spec in specs.values()]
    if differing := [name for name in loads[0] if loads[0][name] != loads[1][name] and name != "trials"]:
        name = differing[0]
        raise UsageError(
            f"load.{name} is {loads[0][name]} in {shown(a)} and {loads[1][name]} in {shown(b)}; expected one load, "
            "or the difference would be its"
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
            "load": {**_said(specs[a.stem]), "trials": rounds},
            "gate": {**gate, "baseline": a.stem} if gate.get("max_regression") else gate,
        },
    )


def _said(spec: ExperimentSpec) -> dict[str, Any]:
    return spec.load.model_dump(mode="json", exclude_unset=True)


def compared_arms(run_dir: Path, metrics: Sequence[Metric] = DEFAULT_METRICS) -> Comparison | None:
    """B against A by their rounds, and in what the two differ; None of a run that is no A/B run, or has no cell yet."""
    spec = read_lock(run_dir)
    if spec.order != "abba" or len(spec.labels) != 2 or not any((run_dir / "cells").glob("*/cell.json")):
        return None
    run = of_run(run_dir)
    a, b = (_arm(run, label) for label in spec.labels)
    return compare_measured(
        a, b, metrics, max_error_rate=spec.gate.error_rate_limit, design="paired", window=spec.gate.window
    )


def _arm(run: Baseline, label: str) -> Baseline:
    """One topology of a run, its cells under the names of their loads alone."""
    cells = tuple(replace(cell, topology="") for cell in run.cells if cell.topology == label)
    conditions = replace(run.conditions, topology=run.conditions.topology.get(label, {}))
    return replace(run, name=label, cells=cells, conditions=conditions)
