"""Renders a run of ``trtx eval``: every score with its interval, unanswered samples, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from trtx.bench.documents import plain
from trtx.evals.structured import OUTCOMES
from trtx.report import structured
from trtx.report.eval_report import (
    Conditions,
    EvalReport,
    ReportChart,
    ReportSection,
    machine_conditions,
    shared_of,
    write_report,
)
from trtx.report.retrieval import RetrievalGrid, grids, heat_map
from trtx.report.scores import ScoreLine, Scores, read_scores, scores_table
from trtx.report.structured import StructuredTable, structured_tables
from trtx.report.tables import heads, terminal_table
from trtx.report.verdict import MISSING
from trtx.runs.forms import LOCK, AskedEvaluation, Provenance

_SCORES = heads(
    "topology", "task", "metric", "score", "95 % interval", "chance", "answered", "shots", text=("task", "metric")
)


@dataclass(frozen=True, slots=True)
class EvaluationView(EvalReport):
    """The data that all output formats of a run show."""

    asked: AskedEvaluation
    scores: Scores

    kind = "scores"
    judged = "topology and task"

    @property
    def provenance(self) -> Provenance:
        return self.asked.provenance

    @property
    def model(self) -> str:
        deployment = self.provenance.environment.deployment
        known = next((one.model for one in self.provenance.measured.values()), None)
        return known or (deployment.model if deployment else MISSING)

    @property
    def lines(self) -> tuple[ScoreLine, ...]:
        """The scores, except the shares of outcomes, which have tables of their own."""
        return tuple(line for line in self.scores.lines if line.score is None or line.score.metric not in OUTCOMES)

    @property
    def grids(self) -> tuple[RetrievalGrid, ...]:
        return grids(self.scores.scored)

    @property
    def structured(self) -> tuple[StructuredTable, ...]:
        return structured_tables(self.scores.scored)

    @property
    def notes(self) -> tuple[str, ...]:
        """Problems as sentences: restarts, an early end, missing scores or answers."""
        return (*self.documents.notes, *self.journal_notes, *self.scores.notes)

    @property
    def conditions(self) -> Conditions:
        scored = self.scores.scored
        found = [("lm-eval", ", ".join(sorted({one.lm_eval for one in scored})) or MISSING)]
        if scored:
            first, shots = scored[0], self.asked.num_fewshot
            found += [
                ("prompts", first.endpoint_type),
                ("samples per task", "all" if first.limit is None else f"the first {first.limit}"),
                ("few-shot examples", "set by each task" if shots is None else str(shots)),
                ("requests in flight", str(self.asked.concurrency)),
            ]
        return (*found, *machine_conditions(self))

    @property
    def sections(self) -> tuple[ReportSection, ...]:
        rows = tuple(
            (
                line.topology, line.task.task, line.metric, line.value, line.interval, line.chance, line.answered,
                str(line.task.num_fewshot),
            )
            for line in self.lines
        )  # fmt: skip
        scores = ReportSection("Scores", _SCORES, rows, scores=tuple(line.score for line in self.lines))
        of_schemas = (section for table in self.structured for section in _structured(table))
        return (scores, *of_schemas, *map(_retrieval, self.grids))

    @property
    def own_fields(self) -> dict[str, Any]:
        return {"scores": [plain(one) for one in self.scores.scored]}

    @property
    def own_parts(self) -> tuple[RenderableType, ...]:
        parts: list[RenderableType] = [scores_table(self.lines)]
        for table in self.structured:
            parts += [Text(), Text(f"{table.title}: {table.note}")]
            parts += [terminal_table(structured.HEADS, table.rows)]
            parts += [Text(), terminal_table(structured.REFUSED_HEADS, table.refused)] if table.refused else []
        for grid in self.grids:
            caption = Text(f"{grid.topology}, {grid.task}: {grid.caption}")
            parts += [Text(), caption, terminal_table(heads(*grid.heads, numbers=grid.heads[:1]), grid.rows)]
        return tuple(parts)


def is_evaluation(run_dir: Path) -> bool:
    """Whether a run directory belongs to a run of ``trtx eval``."""
    return (run_dir / LOCK.file).exists() and "tasks" in LOCK.load(run_dir)


def read_evaluation_view(run_dir: Path) -> EvaluationView:
    asked = LOCK.read(run_dir, AskedEvaluation)
    return EvaluationView(**shared_of(run_dir), asked=asked, scores=read_scores(run_dir, asked.topologies))


def render_evaluation(run_dir: Path) -> EvaluationView:
    """Writes the files of the report, using only the directory's content."""
    return write_report(run_dir, read_evaluation_view(run_dir))


def _structured(table: StructuredTable) -> Iterator[ReportSection]:
    yield ReportSection(f"Structured output: {table.title}", structured.HEADS, table.rows, table.note)
    if table.refused:
        yield ReportSection(f"Refused schemas: {table.title}", structured.REFUSED_HEADS, table.refused)


def _retrieval(grid: RetrievalGrid) -> ReportSection:
    return ReportSection(
        f"Retrieval over length and depth: {grid.topology}, {grid.task}",
        heads(*grid.heads, numbers=grid.heads[:1]),
        grid.rows,
        f"Each field shows the {grid.caption}, with the 95 % interval.",
        ReportChart(grid.name, heat_map(grid), grid.height_px, grid.least_width_px),
    )
