"""Renders scores for ``trtx eval`` and for reports on speed: each with its interval, and missing ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from trtx.evals import Score, ScoredTask, TopologyScores, eval_directory, read_eval
from trtx.evals.forms import SAMPLES, read_samples
from trtx.evals.pairs import outermost
from trtx.report.tables import heads, terminal_table

MISSING = "–"


@dataclass(frozen=True, slots=True)
class ScoreLine:
    """One score, or a task without any, prepared for display."""

    topology: str
    task: ScoredTask
    score: Score | None

    @property
    def metric(self) -> str:
        return MISSING if self.score is None else self.score.name

    @property
    def value(self) -> str:
        return MISSING if self.score is None else f"{self.score.value:.4g}"

    @property
    def interval(self) -> str:
        found = None if self.score is None else self.score.interval
        return MISSING if found is None else f"{found.low:.4g}–{found.high:.4g}"

    @property
    def chance(self) -> str:
        return MISSING if self.score is None or self.score.chance is None else f"{self.score.chance:g}"

    @property
    def answered(self) -> str:
        return f"{self.task.answered}/{self.task.samples}"


@dataclass(frozen=True, slots=True)
class Scores:
    """All scores of a run."""

    scored: tuple[TopologyScores, ...]
    missing: dict[str, int]  # incompletely scored topologies -> number of answered samples

    @property
    def lines(self) -> tuple[ScoreLine, ...]:
        return tuple(self._lines())

    def _lines(self) -> Iterator[ScoreLine]:
        for one in self.scored:
            for task in one.tasks:
                yield from (ScoreLine(one.topology, task, score) for score in task.scores or (None,))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about missing scores, missing answers, and doubts about the model."""
        notes = [
            f"{label}: the scoring is incomplete; samples answered: {count}" for label, count in self.missing.items()
        ]
        for one in self.scored:
            for task in one.tasks:
                notes += [f"{one.topology}, {task.task}: {task.note}"] if task.note else []
                notes += [f"{one.topology}, {task.task} SUSPECT: {doubt}" for doubt in task.doubts if not task.subtasks]
                notes += [f"{one.topology}, {task.task}: no answer to {of}" for of in task.unanswered]
                without: dict[str, list[str]] = {}
                for score in task.scores:
                    if score.no_interval:
                        without.setdefault(score.no_interval, []).append(score.name)
                notes += [
                    f"{one.topology}, {task.task}: no interval of {', '.join(names)}: {reason}"
                    for reason, names in without.items()
                ]
        return tuple(notes)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Groups, and tasks that aren't in a group."""
        return tuple(dict.fromkeys(task.task for one in self.scored for task in outermost(one.tasks)))

    def first(self, topology: str, task: str) -> ScoreLine | None:
        """The task's first metric, which is also used for comparison; None if the topology wasn't scored for
        the task.
        """
        found = (line for line in self.lines if (line.topology, line.task.task) == (topology, task))
        return next(found, None)


def read_scores(run_dir: Path, labels: Sequence[str]) -> Scores:
    """The scores of these topologies. Raises UsageError with file, field and value."""
    found = {label: read_eval(run_dir, label) for label in labels}
    return Scores(
        scored=tuple(scores for scores in found.values() if scores is not None),
        missing={label: _kept(run_dir, label) for label, scores in found.items() if scores is None},
    )


def _kept(run_dir: Path, label: str) -> int:
    return sum(len(read_samples(path.parent)) for path in eval_directory(run_dir, label).glob(f"*/{SAMPLES.file}"))


def scores_table(lines: Sequence[ScoreLine]) -> Table:
    """A terminal table for 80 columns."""
    columns = heads("topology", "task", "metric", "score", "95 % interval", "answered", text=("task", "metric"))
    rows = ((one.topology, one.task.task, one.metric, one.value, one.interval, one.answered) for one in lines)
    return terminal_table(columns, rows)
