"""Renders a run of ``trtx eval fidelity``: each topology's metrics with intervals, their conditions, and the
verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, StrictUndefined, Template
from rich.console import Group, RenderableType
from rich.text import Text

from trtx.bench.documents import plain
from trtx.bench.files import name_of, write_text
from trtx.bench.intact import KeptDocuments, read_kept_documents
from trtx.bench.journal import read_journal
from trtx.evals.fidelity.forms import (
    REFERENCE,
    ComparedSequence,
    PartFigures,
    ReferenceFacts,
    TopologyFidelity,
    fidelity_directory,
    read_compared,
    read_fidelity,
    reference_directory,
)
from trtx.evals.fidelity.gate import why_no_interval
from trtx.report.junit import scores_junit_xml
from trtx.report.left_out import left_out_conditions
from trtx.report.notes import notes_of
from trtx.report.verdict import MISSING, headline, lines, markdown_line, verdict_json, verdict_markdown, verdict_style
from trtx.report.whole_table import WholeTable
from trtx.runs.forms import LOCK, SUMMARY, VERDICT, AskedTopology, Attached, Provenance, RunVerdict
from trtx.stats.intervals import Interval

_OVER = {"text": "text", "prompt": "prompts"}
_FARTHEST = 10  # number of sequences listed on the page


@dataclass(frozen=True, slots=True)
class AskedFidelity:
    """The part of the run's manifest that reports use."""

    check: Literal["fidelity"]
    topologies: tuple[str, ...]  # labels
    osl: int
    concurrency: int
    attach: Attached | None
    topology: AskedTopology
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class FidelityLine:
    """One part of one topology, prepared for display."""

    topology: str
    figures: PartFigures

    @property
    def over(self) -> str:
        return _OVER[self.figures.part]

    @property
    def positions(self) -> str:
        return f"{self.figures.positions:,}"

    @property
    def kl(self) -> str:
        return f"{self.figures.kl.value:.3g}"

    @property
    def kl_interval(self) -> str:
        return _interval(self.figures.kl.interval, "{:.3g}")

    @property
    def shared(self) -> str:
        return f"{100 * self.figures.shared:.3g}"

    @property
    def agreement(self) -> str:
        return f"{100 * self.figures.agreement.value:.2f}"

    @property
    def agreement_interval(self) -> str:
        return _interval(self.figures.agreement.interval, "{:.1f}", 100)

    @property
    def perplexities(self) -> str:
        return f"{self.figures.reference_perplexity:.4g} → {self.figures.served_perplexity:.4g}"

    @property
    def increase(self) -> str:
        return f"{self.figures.perplexity_increase_pct.value:+.2g}"

    @property
    def increase_interval(self) -> str:
        return _interval(self.figures.perplexity_increase_pct.interval, "{:+.2g}")


def _interval(interval: Interval | None, form: str, factor: float = 1) -> str:
    if interval is None:
        return MISSING
    low, high = form.format(factor * interval.low), form.format(factor * interval.high)
    return f"{low} to {high}"


@dataclass(frozen=True, slots=True)
class FarSequence:
    """A sequence whose text diverges most."""

    topology: str
    index: int
    positions: int
    kl: float  # mean, in nats per token
    largest: float
    at: int  # position of the largest divergence in the text, from 1
    agreement_pct: float


@dataclass(frozen=True, slots=True)
class FidelityView:
    """The data that all output formats of a run show."""

    name: str
    asked: AskedFidelity
    reference: ReferenceFacts | None  # None: the run ended before it was computed
    found: tuple[TopologyFidelity, ...]
    missing: dict[str, int]  # incompletely compared topologies -> number of compared sequences
    farthest: tuple[FarSequence, ...]
    verdict: RunVerdict | None
    told: tuple[str, ...]  # restarts and an early end, from the journal
    documents: KeptDocuments  # whether the underlying files have changed

    @property
    def model(self) -> str:
        measured = self.asked.provenance.measured.values()
        return next((one.model for one in measured), MISSING)

    @property
    def lines(self) -> tuple[FidelityLine, ...]:
        return tuple(FidelityLine(one.topology, part) for one in self.found for part in one.parts)

    @property
    def notes(self) -> tuple[str, ...]:
        """Problems as sentences."""
        return tuple(self._notes())

    def _notes(self) -> Iterator[str]:
        yield from self.documents.notes
        yield from self.told
        for label, count in self.missing.items():
            yield f"{label}: it was not compared to its end; sequences answered: {count}"
        for one in self.found:
            if one.note:
                yield f"{one.topology}: {one.note}"
            elif one.top is not None and self.reference is not None and one.top < self.reference.top:
                yield f"{one.topology}: the server shows {one.top} likeliest tokens at most, so no more are compared"
            if one.others is not None:
                yield f"{one.topology}: {one.others.sentence}"
            for part in one.parts:
                named = {"divergence": part.kl, "agreement": part.agreement, "perplexity": part.perplexity_increase_pct}
                if without := [name for name, figure in named.items() if figure.interval is None]:
                    over, why = _OVER[part.part], why_no_interval(one.answered)
                    yield f"{one.topology}, {over}: no interval of {', '.join(without)}: {why}"
            yield from (
                f"{one.topology}, no answer to sequence{str(of).removeprefix('sample')}" for of in one.unanswered
            )

    @property
    def conditions(self) -> tuple[tuple[str, str], ...]:
        """Conditions besides the model on which metrics depend."""
        of, environment = self.reference, self.asked.provenance.environment
        found = [("reference", MISSING if of is None else f"{of.model}, {of.dtype}, embedded engine on {of.device}")]
        if of is not None:
            found.append(("prompts", f"{of.sequences}, {of.prompts}"))
        if self.found:
            found.append(("likeliest tokens", ", ".join(sorted({str(one.top or MISSING) for one in self.found}))))
        found += [
            ("tokens after each", f"{self.asked.osl} at most"),
            ("requests in flight", str(self.asked.concurrency)),
        ]
        found.append(("machine", environment.cpu))
        if environment.gpus:
            found.append(("GPUs", ", ".join(gpu.name for gpu in environment.gpus)))
        found += left_out_conditions(self.asked.provenance)
        found.append(("files", self.documents.told))
        return tuple(found)


def is_fidelity(run_dir: Path) -> bool:
    """Whether a run directory belongs to a run of ``trtx eval fidelity``."""
    return (run_dir / LOCK.file).exists() and LOCK.load(run_dir).get("check") == "fidelity"


def read_fidelity_view(run_dir: Path) -> FidelityView:
    asked = LOCK.read(run_dir, AskedFidelity)
    found = {label: read_fidelity(run_dir, label) for label in asked.topologies}
    compared = {label: read_compared(fidelity_directory(run_dir, label)) for label in asked.topologies}
    return FidelityView(
        name=name_of(run_dir),
        asked=asked,
        reference=REFERENCE.find(reference_directory(run_dir), ReferenceFacts),
        found=tuple(one for one in found.values() if one is not None),
        missing={label: len(compared[label]) for label, one in found.items() if one is None},
        farthest=tuple(far for label in asked.topologies for far in _farthest(label, compared[label])),
        verdict=VERDICT.find(run_dir, RunVerdict),
        told=notes_of(read_journal(run_dir)),
        documents=read_kept_documents(run_dir),
    )


def _farthest(topology: str, compared: tuple[ComparedSequence, ...]) -> list[FarSequence]:
    found = []
    for one in compared:
        kl, agrees = one.kl[one.positions("text")], one.agrees[one.positions("text")]
        if kl:
            largest = max(kl)
            found.append(
                FarSequence(
                    topology, one.index, len(kl), sum(kl) / len(kl), largest, kl.index(largest) + 1,
                    100 * sum(agrees) / len(agrees),
                )
            )  # fmt: skip
    return sorted(found, key=lambda far: far.kl, reverse=True)[:_FARTHEST]


def render_fidelity(run_dir: Path) -> FidelityView:
    """Writes ``summary.json``, ``summary.md``, ``junit.xml`` and ``report.html``, using only the directory's
    content.
    """
    view = read_fidelity_view(run_dir)
    SUMMARY.write(run_dir, fidelity_fields(view))
    write_text(run_dir / "summary.md", fidelity_markdown(view))
    write_text(run_dir / "junit.xml", scores_junit_xml(view.name, view.verdict))
    write_text(run_dir / "report.html", _page(view))
    return view


def fidelity_fields(view: FidelityView) -> dict[str, Any]:
    """The fields of ``summary.json``."""
    return {
        "run": view.name,
        "model": view.model,
        "conditions": dict(view.conditions),
        "notes": list(view.notes),
        "verdict": verdict_json(view.verdict),
        "reference": None if view.reference is None else plain(view.reference),
        "fidelity": [plain(one) for one in view.found],
    }


def fidelity_table(view: FidelityView) -> RenderableType:
    """A terminal table for 80 columns."""
    table = WholeTable()
    table.add_column("topology", overflow="fold")
    table.add_column("over", no_wrap=True)
    for heading in ("KL", "95 %", "seen %", "top-1 %", "95 %", "PPL +%"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in view.lines:
        table.add_row(
            line.topology, line.over, line.kl, line.kl_interval, line.shared, line.agreement, line.agreement_interval,
            line.increase,
        )  # fmt: skip
    if view.lines:
        table.caption = (
            "KL: nats a token, at least; seen: the reference's probability of the tokens that were compared one by "
            "one. top-1: the likeliest token is the same."
        )
    told: list[RenderableType] = [table]
    if view.notes:
        told += [Text(), *(Text(note, "yellow") for note in view.notes)]
    if view.verdict is not None:
        told += [Text(), Text(headline(view.verdict), verdict_style(view.verdict.verdict))]
    return Group(*told)


def fidelity_markdown(view: FidelityView) -> str:
    rows = [
        f"| {line.topology} | {line.over} | {line.positions} | {line.kl} | {line.kl_interval} | {line.shared} | "
        f"{line.agreement} | {line.agreement_interval} | {line.perplexities} | {line.increase} | "
        f"{line.increase_interval} |"
        for line in view.lines
    ]
    text = [
        f"# {view.model}: fidelity",
        "",
        "; ".join(f"{name}: {value}" for name, value in view.conditions) + ".",
        "",
        "| topology | over | tokens | KL, nats a token, at least | 95 % | seen % | same likeliest token % | 95 % | "
        "perplexity | increase % | 95 % |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        *rows,
        *(["", *(f"- {markdown_line(note)}" for note in view.notes)] if view.notes else []),
        *verdict_markdown(view.verdict),
    ]
    return "\n".join(text) + "\n"


def _page(view: FidelityView) -> str:
    judged = () if view.verdict is None else lines(view.verdict)
    return _template().render(view=view, judged=judged, headline=view.verdict and headline(view.verdict))


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((resources.files("trtx.report") / "fidelity.html.j2").read_text(encoding="utf-8"))
