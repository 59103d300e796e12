"""Runs to be judged: copies of the kept one, with as many trials as a test wants, each slower or faster by a factor."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtx.bench import Cell, Figures, read_cells
from trtx.bench.cells import CELL
from trtx.bench.journal import Journal, TrialEnded
from trtx.evals import EVAL, Retrieval, ScoredTask, TopologyScores, eval_directory
from trtx.evals.statistics import share_interval
from trtx.experiment import ExperimentSpec, evaluation_of, gate
from trtx.experiment.baselines.conditions import Conditions, conditions_of
from trtx.experiment.bench import ab
from trtx.experiment.bench.resumption import read_recorded
from trtx.experiment.directory import read_lock, write_lock
from trtx.experiment.gate_spec import GateSpec
from trtx.runs.forms import COMPARISON, CONDITIONS, LOCK, AskedRun, ComparedArms, Provenance, RunVerdict

GOLDEN = Path(__file__).parents[1] / "report" / "golden" / "run"
CELLS = ("agg-c1", "agg-c2", "disagg-c1", "disagg-c2")
NEARLY_ALIKE = (1.0, 1.001, 0.999)  # a spread of 0.1 %
NOISY = (0.9, 1.0, 1.1)
ROUNDS = (1.0, 1.3, 0.8)  # which differ more than the arms of an A/B run do
_TEMPLATES = tempfile.TemporaryDirectory(prefix="trtx-judged-runs-")
_LATENCIES = ("time_to_first_token", "inter_token_latency", "request_latency")


def a_run(
    directory: Path,
    *,
    slower: float = 1.0,
    slower_when_steady: float = 1.0,
    trials: Sequence[float] = NEARLY_ALIKE,
    conditions: Any = None,
) -> Path:
    """The kept run (paced engine, agg and disagg, concurrency 1 and 2) as if each of its trials had taken ``slower``
    times its factor as long, its steady part ``slower_when_steady`` times that. ``conditions``: changes them."""
    run = Path(shutil.copytree(_kept_as(slower, slower_when_steady, tuple(trials)), directory))
    if conditions:
        CONDITIONS.write(run, conditions(conditions_of_kept(run)))
    return run


@functools.cache
def _kept_as(slower: float, slower_when_steady: float, trials: tuple[float, ...]) -> Path:
    """One that is copied: most tests want one of a few."""
    run = Path(_TEMPLATES.name) / str(len(list(Path(_TEMPLATES.name).iterdir())))
    shutil.copytree(GOLDEN, run)
    spec = read_lock(run)
    load = spec.load.model_copy(update={"trials": len(trials)})
    write_lock(run, spec.model_copy(update={"load": load}), provenance(run))
    change_cells(run, lambda cell: of_trials(cell, [slower * factor for factor in trials], slower_when_steady))
    CONDITIONS.write(run, conditions_of_kept(run))
    return run


def conditions_of_kept(run: Path) -> Conditions:
    spec = read_lock(run)
    recorded = read_recorded(run, spec)
    return conditions_of(spec, recorded.plans, provenance(run))


def write_lock_anew(run: Path) -> None:
    """Writes the run manifest of an older trtx as this one would, with later fields as they were at that time."""
    write_lock(run, read_lock(run), provenance(run))


def provenance(run: Path) -> Provenance:
    return LOCK.read(run, AskedRun).provenance


def change_cells(run: Path, change: Callable[[Cell], Cell]) -> None:
    for cell in read_cells(run):
        CELL.write(run / "cells" / cell.name, change(cell).to_json())


def of_trials(cell: Cell, factors: Sequence[float], slower_when_steady: float = 1.0) -> Cell:
    trial = cell.trials[0]
    assert trial.figures is not None and trial.steady is not None
    trials = tuple(
        replace(
            trial,
            number=number,
            figures=_slower(trial.figures, factor),
            steady=_slower(trial.steady, slower_when_steady * factor),
        )
        for number, factor in enumerate(factors, 1)
    )
    mean = sum(factors) / len(factors)
    return replace(
        cell,
        trials_asked=len(trials),
        trials=trials,
        figures=_slower(trial.figures, mean, len(factors)),
        steady=_slower(trial.steady, slower_when_steady * mean, len(factors)),
    )


def _slower(figures: Figures, factor: float, trials: int = 1) -> Figures:
    stored: dict[str, Any] = {}
    for name, value in figures.stored.items():
        if name in _LATENCIES:
            known = {
                part: one for part, one in value.items() if one is not None
            }  # the kept cells lack a later percentile
            stored[name] = value | {part: one * factor for part, one in known.items()}
            stored[name]["count"] = value["count"] * trials
        elif "throughput" in name:
            stored[name] = value / factor
        else:
            stored[name] = value * trials if name.endswith("request_count") else value
    return Figures(stored)


def gated(run: Path, **said: Any) -> ExperimentSpec:
    """What the run was asked, with this gate."""
    return read_lock(run).model_copy(update={"gate": GateSpec.model_validate(said)})


def prepare(run: Path, spec: ExperimentSpec) -> None:
    """As before anything starts."""
    recorded = read_recorded(run, read_lock(run))
    gate.prepare(run, spec, recorded.plans, provenance(run))


def judged(run: Path, **said: Any) -> RunVerdict:
    """As a run with this gate is, from its start to its end."""
    spec = gated(run, **said)
    prepare(run, spec)
    return gate.judge(run, spec)


def an_ab_run(directory: Path, slower: float, rounds: Sequence[float] = ROUNDS) -> Path:
    """As if agg and disagg of the kept run had been arms of one kind, the second so much slower in each round."""
    run = a_run(directory, trials=rounds)
    write_lock(run, read_lock(run).model_copy(update={"order": "abba"}), provenance(run))
    for kept in (cell for cell in read_cells(GOLDEN) if cell.topology == "agg"):
        for topology, factor in (("agg", 1.0), ("disagg", slower)):
            cell = replace(of_trials(kept, [factor * one for one in rounds]), topology=topology)
            CELL.write(run / "cells" / cell.name, cell.to_json())
    (run / "journal.jsonl").unlink()
    for number in range(1, len(rounds) + 1):
        for topology in ("agg", "disagg")[:: 1 if number % 2 else -1]:
            for load in ("c1", "c2"):
                ended = TrialEnded(cell=f"{topology}-{load}", trial=number, aiperf_exit_code=0, restarted=())
                Journal(run).note(ended)
    return run


def compared(run: Path, **said: Any) -> ComparedArms:
    """What an A/B run with this gate has of its arms when it has ended."""
    ab.keep_comparison(run, gated(run, **said), judged(run, **said))
    return COMPARISON.read(run, ComparedArms)


def a_needle_run(directory: Path, found: tuple[Retrieval, ...]) -> Path:
    """A run of ``trtx eval --tasks needle`` that found this, with no sample kept of it."""
    directory.mkdir(exist_ok=True)
    write_lock(directory, evaluation_of({"tasks": ["needle"]}), provenance(GOLDEN))
    task = ScoredTask("needle", "generate_until", "1", 0, 50, 38, (), (), None, (), found)
    scores = TopologyScores("agg", "0.4.13", "completions", None, None, (task,))
    EVAL.write(eval_directory(directory, "agg"), scores)
    return directory


def retrieval(length: int, depth: int, right: int, answered: int, samples: int = 10) -> Retrieval:
    """Of one length and depth; ``samples``: 0 where it was not asked."""
    share = share_interval([1] * right + [0] * (answered - right))
    least, most = (length - 40, length - 34) if samples else (None, None)
    return Retrieval(length, depth, least, most, samples, answered, share)
