"""Renders tasks with JSON schemas: the shares of their outcomes, free and constrained side by side, and refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trtx.evals import Score, ScoredTask, TopologyScores
from trtx.evals.forms import Arm, ArmDifference
from trtx.evals.structured import BROKEN, CORRECT, CUT, PARSES, REFUSED, VALID, arm_name
from trtx.report.tables import heads
from trtx.report.verdict import MISSING
from trtx.stats.intervals import Interval

HEADS = heads("share of samples", "free", "constrained", "constrained − free")
REFUSED_HEADS = heads("samples", "first", "reason", text=("reason",), numbers=("samples",))
_ROWS = {
    PARSES: "valid JSON",
    VALID: "valid by its schema",
    CORRECT: "equals its reference",
    BROKEN: "complete but invalid",
    CUT: "cut by max_tokens",
    REFUSED: "schema refused",
}


@dataclass(frozen=True, slots=True)
class StructuredTable:
    """One task with JSON schemas on one topology. A dash: the share is unknown, or its requests were not sent."""

    topology: str
    task: str
    arms: dict[Arm, ScoredTask]
    differences: dict[str, ArmDifference]  # by metric

    @property
    def title(self) -> str:
        return f"{self.topology}, {self.task}"

    @property
    def note(self) -> str:
        """What the numbers are. A metric's intervals of the differences hold together for all tasks."""
        found = [one for one in self.differences.values() if one.difference is not None]
        if not found or found[0].difference is None:
            return "Shares have their 95 % intervals."
        confidence = f"{100 * found[0].difference.confidence:.4g} %"
        note = f"Shares have their 95 % intervals, and the difference of the same samples one of {confidence}."
        asked = max(task.samples for task in self.arms.values())
        if (pairs := min(one.pairs for one in found)) < asked:
            note += f" The difference covers {pairs} of {asked} samples, which both arms answered."
        return note

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        return tuple(self._rows())

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for metric, title in _ROWS.items():
            free, constrained = (_score(self.arms.get(arm), metric) for arm in ("free", "constrained"))
            if metric != CORRECT or free or constrained:  # only some tasks have references
                yield title, _share(free), _share(constrained), _signed(self.differences.get(metric))

    @property
    def refused(self) -> tuple[tuple[str, ...], ...]:
        """Number of samples, the first sample, and the reason."""
        return tuple(
            (str(one.count), str(one.first), one.reason) for task in self.arms.values() for one in task.refused
        )


def structured_tables(scored: Sequence[TopologyScores]) -> tuple[StructuredTable, ...]:
    return tuple(table for one in scored for table in _tables(one))


def _tables(scores: TopologyScores) -> Iterator[StructuredTable]:
    arms: dict[str, dict[Arm, ScoredTask]] = {}
    for task in scores.tasks:
        if task.arm is not None:
            arms.setdefault(task.task.removesuffix(arm_name("", task.arm)), {})[task.arm] = task
    for name, own in arms.items():
        differences = {one.metric: one for one in scores.arm_differences if one.task == name}
        yield StructuredTable(scores.topology, name, own, differences)


def _score(task: ScoredTask | None, metric: str) -> Score | None:
    return None if task is None else next((score for score in task.scores if score.metric == metric), None)


def _share(score: Score | None) -> str:
    if score is None:
        return MISSING
    found = score.interval
    return f"{score.value:.2f}" if found is None else f"{found.estimate:.2f} ({found.low:.2f}–{found.high:.2f})"


def _signed(found: ArmDifference | None) -> str:
    one: Interval | None = None if found is None else found.difference
    return MISSING if one is None else f"{one.estimate:+.2f} ({one.low:+.2f} to {one.high:+.2f})"
