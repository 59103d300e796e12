"""A baseline: the metrics of a run's cells per trial, its scores per sample, and its conditions, in one small file.

Cells are stored as in ``cell.json``, each with its schema version, so they remain readable as long as cells do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from trtx.bench import Cell, Load, cell_name
from trtx.bench.cells import CELL
from trtx.bench.documents import RESTORE, DocumentKind, plain
from trtx.bench.files import name_of, write_text
from trtx.bench.intact import (
    Kept,
    KeptDocuments,
    as_kept,
    read_kept,
    refuse_changed,
    refuse_changed_documents,
    why_unchecked,
)
from trtx.bench.judge.judgement import Verdict
from trtx.bench.judge.sample import CellSample, Window
from trtx.errors import UsageError
from trtx.evals.pairs import TopologyValues
from trtx.experiment.baselines.conditions import Conditions, conditions_of_scores
from trtx.experiment.bench.resumption import PlanDocument
from trtx.experiment.evaluation_spec import read_evaluation
from trtx.experiment.scores import scores_of_run
from trtx.report.evaluation import is_evaluation
from trtx.report.fidelity import is_fidelity
from trtx.report.parity import is_parity
from trtx.runs.forms import BASELINE, CONDITIONS, LOCK, PLAN, VERDICT, AskedOf, AskedRun, AskedScores, RunVerdict

_LISTED = ("cells", "scores")  # written with one entry per line
_NO_DIGEST = "its file has no SHA-256 of itself, as an older trtx wrote it"


@dataclass(frozen=True, slots=True)
class Baseline:
    """The reference of a comparison. A run can serve as one directly."""

    name: str
    run: str  # name of the run directory in which it was measured
    saved_at: datetime
    verdict: Verdict | None  # of that run; None: not judged, because it ended early
    conditions: Conditions
    promoted_at: datetime | None  # None: still a candidate
    superseded_by: str | None  # name of a later baseline with the same conditions
    cells: tuple[Cell, ...]
    scores: tuple[TopologyValues, ...] = ()  # empty if the run had no scoring
    records_unchecked: str | None = None  # cells whose metrics can't be checked against their records, and why
    unmeasured: tuple[str, ...] = ()  # requested cells that the run did not reach
    unscored: tuple[str, ...] = ()  # topologies that the run should have scored but did not reach

    def samples(self, window: Window) -> tuple[CellSample, ...]:
        """One sample per cell. A baseline has metrics for both windows, whichever window its run used."""
        return tuple(CellSample.of(cell, window) for cell in self.cells)

    @property
    def loads(self) -> dict[str, Load]:
        """Loads by cell name."""
        return {cell.name: cell.load for cell in self.cells}

    @property
    def is_current(self) -> bool:
        """Whether it can be selected by conditions: promoted and not superseded."""
        return self.promoted_at is not None and self.superseded_by is None

    @property
    def state(self) -> str:
        if self.superseded_by is not None:
            return f"superseded by {self.superseded_by}"
        return "candidate" if self.promoted_at is None else "promoted"


@dataclass(frozen=True, slots=True)
class StoredBaseline:
    """Content of a baseline's file."""

    name: str
    run: str
    saved_at: datetime
    verdict: Verdict | None
    conditions: Conditions
    promoted_at: datetime | None
    superseded_by: str | None
    cells: tuple[dict[str, Any], ...]
    scores: tuple[TopologyValues, ...] = ()
    records_unchecked: str | None = "it was saved before records were checked"
    unmeasured: tuple[str, ...] = ()
    unscored: tuple[str, ...] = ()
    sha256: str | None = None  # over all other fields; None: written by an older trtx


def of_run(run_dir: Path) -> Baseline:
    """The baseline that a run directory represents.

    Raises UsageError if it has no cell, if its conditions were not recorded, or if its records have changed since its
    metrics were computed.
    """
    if not (run_dir / LOCK.file).exists():
        raise UsageError(f"{run_dir} is not a run directory, because it has no {LOCK.file}; expected one of trtx bench")
    if is_evaluation(run_dir):
        raise UsageError(
            f"{run_dir} is a run of trtx eval, which measures no speed; save a baseline from a run of trtx bench"
        )
    for check, is_it in (("fidelity", is_fidelity), ("parity", is_parity)):
        if is_it(run_dir):
            raise UsageError(
                f"{run_dir} is a run of trtx eval {check}, which has neither speed nor scores to compare; expected one "
                "of trtx bench or trtx eval --tasks"
            )
    conditions = CONDITIONS.read(run_dir, Conditions)
    judged = VERDICT.find(run_dir, RunVerdict)
    cells = read_kept(run_dir)
    kept = {name: became for name, (_, became) in cells.items()}
    refuse_changed(run_dir, kept)
    documents = refuse_changed_documents(run_dir)
    if not cells:
        raise UsageError(f"{run_dir} has no finished cell; resume the run first")
    name = name_of(run_dir)
    asked = LOCK.read(run_dir, AskedRun)
    saved_at = asked.provenance.environment.started_at
    names = (cell_name(label, load) for label in asked.topologies for load in asked.load.cells)
    verdict = None if judged is None else judged.verdict
    scores = scores_of_run(run_dir)
    return Baseline(
        name, name, saved_at, verdict, conditions, None, None, tuple(as_kept(*one) for one in cells.values()),
        scores, _unchecked(kept, documents), tuple(one for one in names if one not in cells),
        () if asked.eval is None else _unscored(asked.topologies, scores),
    )  # fmt: skip


def of_scored_run(run_dir: Path) -> Baseline:
    """The baseline that a run of ``trtx eval`` represents: scores without speed. Raises UsageError without scores."""
    if not (scores := scores_of_run(run_dir)):
        raise UsageError(f"{run_dir} has no scores; resume it with trtx eval --resume")
    documents = refuse_changed_documents(run_dir)
    provenance = LOCK.read(run_dir, AskedOf).provenance
    judged = VERDICT.find(run_dir, RunVerdict)
    name, verdict = name_of(run_dir), None if judged is None else judged.verdict
    started_at = provenance.environment.started_at
    return Baseline(
        name, name, started_at, verdict, conditions_of_run(run_dir), None, None, (), scores,
        _unchecked({}, documents), unscored=_unscored(LOCK.read(run_dir, AskedScores).topologies, scores),
    )  # fmt: skip


def _unchecked(kept: Mapping[str, Kept], documents: KeptDocuments) -> str | None:
    """A clause that names the run's cells and files that can't be checked for changes, and why; None if all can."""
    reasons = (why_unchecked(kept), None if documents.unchecked is None else f"other files: {documents.unchecked}")
    return "; ".join(filter(None, reasons)) or None


def _unscored(asked: Sequence[str], scores: Sequence[TopologyValues]) -> tuple[str, ...]:
    scored = {one.topology for one in scores}
    return tuple(label for label in asked if label not in scored)


def conditions_of_run(run_dir: Path) -> Conditions:
    """The conditions of a run of ``trtx bench``, which stores them, or of ``trtx eval``. Raises UsageError."""
    if not is_evaluation(run_dir):
        return CONDITIONS.read(run_dir, Conditions)
    provenance, planned = LOCK.read(run_dir, AskedOf).provenance, PLAN.find(run_dir, PlanDocument)
    return conditions_of_scores(read_evaluation(run_dir), {} if planned is None else planned.topologies, provenance)


def records_unchecked(*compared: Baseline) -> tuple[str, ...]:
    """One sentence for each baseline whose metrics were not checked against its records."""
    return tuple(
        f"the metrics of {one.name} were not checked against its records ({one.records_unchecked})"
        for one in compared
        if one.records_unchecked is not None
    )


def check_window(baseline: Baseline, window: Window) -> None:
    """Raises UsageError if a baseline lacks the metrics of the window to compare."""
    if window == "steady" and (
        lacking := [one.cell for one in baseline.samples(window) if one.trials_without_steady()]
    ):
        raise UsageError(
            f"{baseline.name} has trials without a steady part in {', '.join(lacking)}, and --window steady compares "
            "those; expected a baseline of longer trials, or --window whole"
        )


def read_baseline(path: Path) -> Baseline:
    """Reads a baseline's file. Raises UsageError with file, field and value, or if the file changed after it
    was saved.
    """
    fields = _document(path).load(path.parent)
    stored = _document(path).restored(fields, StoredBaseline, str(path))
    unchecked = [stored.records_unchecked, _NO_DIGEST if stored.sha256 is None else None]
    cells = []
    for place, cell in enumerate(stored.cells):
        source = f"{path}, cells.{place}"
        cells.append(CELL.restored(CELL.checked(cell, source), Cell, source))
    _refuse_twice(path, cells)
    if stored.sha256 not in (None, _sha256(fields)):
        raise UsageError(
            f"{path} was changed since it was saved (its sha256 differs); restore the file from a copy, or save the "
            "baseline again from its run"
        )
    return Baseline(
        stored.name, stored.run, stored.saved_at, stored.verdict, stored.conditions, stored.promoted_at,
        stored.superseded_by, tuple(cells), stored.scores, "; ".join(filter(None, unchecked)) or None,
        stored.unmeasured, stored.unscored,
    )  # fmt: skip


def _sha256(fields: Mapping[str, Any]) -> str:
    content = {name: value for name, value in fields.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _refuse_twice(path: Path, cells: Sequence[Cell]) -> None:
    """Raises UsageError if a cell or a trial is listed twice, as after a merge of two versions by lines.

    Otherwise one of the two cells would be used without a hint, and a trial would count twice.
    """
    names = [cell.name for cell in cells]
    for cell in cells:
        numbers = [trial.number for trial in cell.trials]
        if names.count(cell.name) > 1:
            raise UsageError(f"{path}: cell {cell.name} is listed twice; expected once; {RESTORE}")
        if len(set(numbers)) < len(numbers):
            raise UsageError(f"{path}: a trial of {cell.name} is listed twice; expected once; {RESTORE}")


def write_baseline(path: Path, baseline: Baseline) -> None:
    """Writes a baseline atomically. Raises UsageError if that fails.

    Each cell and each scored topology is one line, so that a diff of two versions shows which of them changed.
    """
    stored = StoredBaseline(
        baseline.name, baseline.run, baseline.saved_at, baseline.verdict, baseline.conditions, baseline.promoted_at,
        baseline.superseded_by, tuple(CELL.versioned(cell.to_json()) for cell in baseline.cells),
        baseline.scores, baseline.records_unchecked, baseline.unmeasured, baseline.unscored,
    )  # fmt: skip
    fields = BASELINE.versioned(plain(stored))
    fields = {name: value for name, value in fields.items() if value or name not in _LISTED}
    fields["sha256"] = _sha256(fields)
    listed = {name: fields.pop(name) for name in _LISTED if name in fields}
    lines = [f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    lines += [f"  {json.dumps(name)}: {_line_each(values)}" for name, values in listed.items()]
    try:
        write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")
    except OSError as error:
        raise UsageError(
            f"{path} can't be written ({error.strerror}); free some space, or choose another directory"
        ) from error


def _line_each(values: list[Any]) -> str:
    lines = ",\n".join(f"    {json.dumps(value, ensure_ascii=False)}" for value in values)
    return f"[\n{lines}\n  ]"


def _document(path: Path) -> DocumentKind:
    return replace(BASELINE, file=path.name)
