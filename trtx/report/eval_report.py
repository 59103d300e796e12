"""The common part of the reports of ``trtx eval``, ``eval fidelity`` and ``eval parity``, with their files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

from trtx.bench.files import name_of, write_text
from trtx.bench.intact import KeptDocuments, read_kept_documents
from trtx.bench.journal import read_journal
from trtx.evals import Score
from trtx.report.charts import Chart
from trtx.report.journal_notes import notes_of
from trtx.report.junit import scores_junit_xml
from trtx.report.left_out import left_out_conditions
from trtx.report.tables import Head, heads, markdown_line, markdown_table
from trtx.report.templates import in_script, plotly_source, rendered
from trtx.report.verdict import MISSING, compared_with, headline, lines, verdict_json, verdict_markdown, verdict_style
from trtx.runs.forms import SUMMARY, VERDICT, Provenance, RunVerdict

Conditions = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ReportChart:
    """A Plotly chart with the space that it needs on the page."""

    id: str
    plot: Chart
    height_px: int
    least_width_px: int


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A table with its title and an explanation. On the page, a chart replaces the table."""

    title: str
    heads: tuple[Head, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    chart: ReportChart | None = None
    scores: tuple[Score | None, ...] = ()  # of each row: the page draws them as bars in a last column


@dataclass(frozen=True, slots=True)
class EvalReport(ABC):
    """What all formats of a report show."""

    name: str  # of the directory
    verdict: RunVerdict | None  # None: the run ended early and was not judged
    journal_notes: tuple[str, ...]  # restarts and an early end
    documents: KeptDocuments  # whether the underlying files have changed

    kind: ClassVar[str]  # follows the model in titles
    judged: ClassVar[str] = "topology"  # head of the column with the subject of each judgement

    @property
    @abstractmethod
    def provenance(self) -> Provenance: ...

    @property
    @abstractmethod
    def notes(self) -> tuple[str, ...]:
        """Problems as sentences, the most important first."""

    @property
    @abstractmethod
    def conditions(self) -> Conditions:
        """Conditions besides the model on which the metrics depend."""

    @property
    @abstractmethod
    def sections(self) -> tuple[ReportSection, ...]:
        """The tables of the page and of ``summary.md``."""

    @property
    @abstractmethod
    def own_fields(self) -> dict[str, Any]:
        """The fields of ``summary.json`` that only this kind of report has."""

    @property
    @abstractmethod
    def own_parts(self) -> tuple[RenderableType, ...]:
        """What only this kind of report shows on a terminal of 80 columns."""

    @property
    def details(self) -> tuple[ReportSection, ...]:
        """Further tables of the page."""
        return ()

    @property
    def model(self) -> str:
        return next((one.model for one in self.provenance.measured.values()), MISSING)

    @property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``."""
        return {
            "run": self.name,
            "model": self.model,
            "conditions": dict(self.conditions),
            "notes": list(self.notes),
            "verdict": verdict_json(self.verdict),
            **self.own_fields,
        }

    @property
    def on_terminal(self) -> RenderableType:
        """The report's own parts, followed by its notes and the verdict."""
        shown = list(self.own_parts)
        if self.notes:
            shown += [Text(), *(Text(note, "yellow") for note in self.notes)]
        if self.verdict is not None:
            shown += [Text(), Text(headline(self.verdict), verdict_style(self.verdict.verdict))]
        return Group(*shown)


Report = TypeVar("Report", bound=EvalReport)


def shared_of(run_dir: Path) -> dict[str, Any]:
    """The fields of :class:`EvalReport`, read from a run directory."""
    return {
        "name": name_of(run_dir),
        "verdict": VERDICT.find(run_dir, RunVerdict),
        "journal_notes": notes_of(read_journal(run_dir)),
        "documents": read_kept_documents(run_dir),
    }


def machine_conditions(view: EvalReport) -> Conditions:
    """The last conditions of every report: the machine, settings without effect, and the state of the files."""
    environment = view.provenance.environment
    gpus = (("GPUs", ", ".join(gpu.name for gpu in environment.gpus)),) if environment.gpus else ()
    left_out = left_out_conditions(view.provenance)
    return (("machine", environment.cpu), *gpus, *left_out, ("files", view.documents.state))


def write_report(run_dir: Path, view: Report) -> Report:
    """Writes ``summary.json``, ``summary.md``, ``junit.xml`` and ``report.html``. Returns ``view``."""
    SUMMARY.write(run_dir, view.summary)
    write_text(run_dir / "summary.md", _markdown(view))
    write_text(run_dir / "junit.xml", scores_junit_xml(view.name, view.verdict))
    write_text(run_dir / "report.html", _page(view))
    return view


def _markdown(view: EvalReport) -> str:
    text = [f"# {view.model}: {view.kind}", "", "; ".join(f"{name}: {value}" for name, value in view.conditions) + "."]
    text += ["", *(f"- {markdown_line(note)}" for note in view.notes)] if view.notes else []
    for place, section in enumerate(view.sections):
        text += ["", f"## {section.title}"] if place else []
        text += ["", *markdown_table(section.heads, section.rows)]
        text += ["", section.note] if section.note else []
    return "\n".join([*text, *verdict_markdown(view.verdict)]) + "\n"


def _page(view: EvalReport) -> str:
    drawn = {section.chart.id: section.chart.plot for section in view.sections if section.chart}
    return rendered(
        "eval.html.j2",
        {
            "view": view,
            "sections": (*view.sections, *view.details, *_verdict(view)),
            "headline": view.verdict and headline(view.verdict),
            "drawn": in_script(drawn),
            "plotly": plotly_source() if drawn else "",
        },
    )


def _verdict(view: EvalReport) -> tuple[ReportSection, ...]:
    if view.verdict is None or not view.verdict.judgements:
        return ()
    rows = tuple(
        (one.judgement.cell, one.judgement.criterion, one.measured, one.judgement.verdict.value, "; ".join(one.remarks))
        for one in lines(view.verdict)
    )
    columns = heads(view.judged, "criterion", "measured", "verdict", "why", text=("criterion", "verdict", "why"))
    note = compared_with(view.verdict.baseline) if view.verdict.baseline else ""
    return (ReportSection("Verdict", columns, rows, note),)
