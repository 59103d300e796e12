"""Renders a run of ``trtx eval``: every score with its interval, unanswered samples, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trtx.bench.documents import plain
from trtx.bench.files import name_of, write_text
from trtx.bench.intact import KeptDocuments, read_kept_documents
from trtx.bench.journal import read_journal
from trtx.bench.judge.judgement import Verdict
from trtx.report.junit import scores_junit_xml
from trtx.report.left_out import left_out_conditions
from trtx.report.notes import notes_of
from trtx.report.page import in_script, plotly_source
from trtx.report.retrieval import RetrievalGrid, grids, heat_map
from trtx.report.scores import ScoreLine, Scores, read_scores, scores_table
from trtx.report.verdict import MISSING, headline, lines, markdown_line, table_cell, verdict_json, verdict_markdown
from trtx.report.whole_table import WholeTable
from trtx.runs.forms import LOCK, SUMMARY, VERDICT, AskedEvaluation, RunVerdict

_STYLE = {Verdict.PASS: "green", Verdict.NO_VERDICT: "yellow"}


@dataclass(frozen=True, slots=True)
class EvaluationView:
    """The data that all output formats of a run show."""

    name: str
    asked: AskedEvaluation
    scores: Scores
    verdict: RunVerdict | None
    told: tuple[str, ...]  # restarts and an early end, from the journal
    documents: KeptDocuments  # whether the underlying files have changed

    @property
    def model(self) -> str:
        measured = self.asked.provenance.measured.values()
        deployment = self.asked.provenance.environment.deployment
        return next((one.model for one in measured), None) or (deployment.model if deployment else MISSING)

    @property
    def lines(self) -> tuple[ScoreLine, ...]:
        return self.scores.lines

    @property
    def grids(self) -> tuple[RetrievalGrid, ...]:
        return grids(self.scores.scored)

    @property
    def notes(self) -> tuple[str, ...]:
        """Problems as sentences: restarts, an early end, missing scores or answers."""
        return (*self.documents.notes, *self.told, *self.scores.notes)

    @property
    def conditions(self) -> tuple[tuple[str, str], ...]:
        """Conditions besides the model on which scores depend."""
        scored = self.scores.scored
        found = [("lm-eval", ", ".join(sorted({one.lm_eval for one in scored})) or MISSING)]
        if scored:
            first, shots = scored[0], self.asked.num_fewshot
            found += [
                ("prompts", first.endpoint_type),
                ("samples a task", "all" if first.limit is None else f"the first {first.limit}"),
                ("few-shot examples", "as each task says" if shots is None else str(shots)),
                ("requests in flight", str(self.asked.concurrency)),
            ]
        environment = self.asked.provenance.environment
        found.append(("machine", environment.cpu))
        if environment.gpus:
            found.append(("GPUs", ", ".join(gpu.name for gpu in environment.gpus)))
        found += left_out_conditions(self.asked.provenance)
        found.append(("files", self.documents.told))
        return tuple(found)


def is_evaluation(run_dir: Path) -> bool:
    """Whether a run directory belongs to a run of ``trtx eval``."""
    return (run_dir / LOCK.file).exists() and "tasks" in LOCK.load(run_dir)


def read_evaluation_view(run_dir: Path) -> EvaluationView:
    asked = LOCK.read(run_dir, AskedEvaluation)
    return EvaluationView(
        name=name_of(run_dir),
        asked=asked,
        scores=read_scores(run_dir, asked.topologies),
        verdict=VERDICT.find(run_dir, RunVerdict),
        told=notes_of(read_journal(run_dir)),
        documents=read_kept_documents(run_dir),
    )


def render_evaluation(run_dir: Path) -> EvaluationView:
    """Writes ``summary.json``, ``summary.md``, ``junit.xml`` and ``report.html``, using only the directory's
    content.
    """
    view = read_evaluation_view(run_dir)
    SUMMARY.write(run_dir, evaluation_fields(view))
    write_text(run_dir / "summary.md", evaluation_markdown(view))
    write_text(run_dir / "junit.xml", scores_junit_xml(view.name, view.verdict))
    write_text(run_dir / "report.html", _page(view))
    return view


def evaluation_fields(view: EvaluationView) -> dict[str, Any]:
    """The fields of ``summary.json``."""
    return {
        "run": view.name,
        "model": view.model,
        "conditions": dict(view.conditions),
        "notes": list(view.notes),
        "verdict": verdict_json(view.verdict),
        "scores": [plain(one) for one in view.scores.scored],
    }


def evaluation_table(view: EvaluationView) -> RenderableType:
    """A terminal table for 80 columns."""
    told: list[RenderableType] = [scores_table(view.lines)]
    for grid in view.grids:
        told += [Text(), Text(f"{grid.topology}, {grid.task}: {grid.caption}"), _retrieval_table(grid)]
    if view.notes:
        told += [Text(), *(Text(note, "yellow") for note in view.notes)]
    if view.verdict is not None:
        told += [Text(), Text(headline(view.verdict), _STYLE.get(view.verdict.verdict, "bold red"))]
    return Group(*told)


def evaluation_markdown(view: EvaluationView) -> str:
    rows = [
        f"| {line.topology} | {table_cell(line.task.task)} | {line.metric} | {line.value} | {line.interval} | "
        f"{line.chance} | {line.answered} |"
        for line in view.lines
    ]
    text = [
        f"# {view.model}: scores",
        "",
        "; ".join(f"{name}: {value}" for name, value in view.conditions) + ".",
        "",
        "| topology | task | metric | score | 95 % interval | chance | answered |",
        "|---|---|---|--:|--:|--:|--:|",
        *rows,
        *(line for grid in view.grids for line in _retrieval_markdown(grid)),
        *(["", *(f"- {markdown_line(note)}" for note in view.notes)] if view.notes else []),
        *verdict_markdown(view.verdict),
    ]
    return "\n".join(text) + "\n"


def _retrieval_table(grid: RetrievalGrid) -> Table:
    table = WholeTable()
    table.add_column("tokens", justify="right", no_wrap=True)
    for depth in grid.depths:
        table.add_column(f"depth {depth} %", justify="right", overflow="fold")
    for row in grid.rows:
        table.add_row(*row)
    return table


def _retrieval_markdown(grid: RetrievalGrid) -> list[str]:
    return [
        "",
        f"{grid.topology}, {grid.task}: {grid.caption}.",
        "",
        f"| tokens | {' | '.join(f'depth {depth} %' for depth in grid.depths)} |",
        f"|--:|{'--:|' * len(grid.depths)}",
        *(f"| {' | '.join(row)} |" for row in grid.rows),
    ]


def _page(view: EvaluationView) -> str:
    judged = () if view.verdict is None else lines(view.verdict)
    drawn = {grid.name: heat_map(grid) for grid in view.grids}
    return _template().render(
        view=view, judged=judged, headline=view.verdict and headline(view.verdict),
        drawn=in_script(drawn), plotly=plotly_source() if drawn else "",
    )  # fmt: skip


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((resources.files("trtx.report") / "evaluation.html.j2").read_text(encoding="utf-8"))
