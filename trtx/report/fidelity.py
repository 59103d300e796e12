"""Renders a run of ``trtx eval fidelity``: each topology's metrics with intervals, their conditions, and the
verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import RenderableType

from trtx.bench.documents import plain
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
from trtx.report.eval_report import (
    Conditions,
    EvalReport,
    ReportSection,
    machine_conditions,
    shared_of,
    write_report,
)
from trtx.report.tables import heads, terminal_table
from trtx.report.verdict import MISSING
from trtx.runs.forms import LOCK, AskedTopology, Attached, Provenance
from trtx.stats.intervals import Interval

_OVER = {"text": "text", "prompt": "prompts"}
_FARTHEST = 10  # number of sequences listed on the page
_REFERENCE = heads(
    "topology", "over", "tokens", "KL, nats a token, at least", "95 % interval", "seen %", "same likeliest token %",
    "95 % interval", "perplexity", "increase %", "95 % interval",
    text=("over",),
)  # fmt: skip
_FAR = heads(
    "topology", "sequence", "tokens of text", "KL, nats a token, at least", "largest", "at token",
    "same likeliest token %",
)  # fmt: skip
_NOTE = (
    "Text: the reference's greedy continuation of each prompt. Seen: the reference's probability of the tokens that "
    "both sides report, which are compared one by one. All other tokens are compared as one group, so the true "
    "divergence may be larger."
)


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
class FidelityData(EvalReport):
    """The data that all output formats of a run show."""

    asked: AskedFidelity
    reference: ReferenceFacts | None  # None: the run ended before it was computed
    found: tuple[TopologyFidelity, ...]
    missing: dict[str, int]  # incompletely compared topologies -> number of compared sequences
    farthest: tuple[FarSequence, ...]

    kind = "fidelity"

    @property
    def provenance(self) -> Provenance:
        return self.asked.provenance

    @property
    def lines(self) -> tuple[FidelityLine, ...]:
        return tuple(FidelityLine(one.topology, part) for one in self.found for part in one.parts)

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each problem of the run."""
        return tuple(self._notes())

    def _notes(self) -> Iterator[str]:
        yield from self.documents.notes
        yield from self.journal_notes
        for label, count in self.missing.items():
            yield f"{label}: the comparison is incomplete; sequences answered: {count}"
        for one in self.found:
            if one.note:
                yield f"{one.topology}: {one.note}"
            elif one.top is not None and self.reference is not None and one.top < self.reference.top:
                yield f"{one.topology}: the server shows {one.top} likeliest tokens at most, so no more are compared"
            if one.others is not None:
                yield f"{one.topology}: {one.others.sentence}"
            for part in one.parts:
                named = {"divergence": part.kl, "agreement": part.agreement, "perplexity": part.perplexity_increase_pct}
                if without := [name for name, mean in named.items() if mean.interval is None]:
                    over, why = _OVER[part.part], why_no_interval(one.answered)
                    yield f"{one.topology}, {over}: no interval of {', '.join(without)}: {why}"
            yield from (
                f"{one.topology}, no answer to sequence{str(of).removeprefix('sample')}" for of in one.unanswered
            )

    @property
    def conditions(self) -> Conditions:
        of = self.reference
        found = [("reference", MISSING if of is None else f"{of.model}, {of.dtype}, embedded engine on {of.device}")]
        if of is not None:
            found.append(("prompts", f"{of.sequences}, {of.prompts}"))
        if self.found:
            found.append(("likeliest tokens", ", ".join(sorted({str(one.top or MISSING) for one in self.found}))))
        found += [
            ("tokens after each", f"{self.asked.osl} at most"),
            ("requests in flight", str(self.asked.concurrency)),
        ]
        return (*found, *machine_conditions(self))

    @property
    def sections(self) -> tuple[ReportSection, ...]:
        rows = tuple(
            (
                line.topology, line.over, line.positions, line.kl, line.kl_interval, line.shared, line.agreement,
                line.agreement_interval, line.perplexities, line.increase, line.increase_interval,
            )
            for line in self.lines
        )  # fmt: skip
        return (ReportSection("Against the reference", _REFERENCE, rows, _NOTE),)

    @property
    def details(self) -> tuple[ReportSection, ...]:
        rows = tuple(
            (
                far.topology, str(far.index), str(far.positions), f"{far.kl:.3g}", f"{far.largest:.3g}", str(far.at),
                f"{far.agreement_pct:.1f}",
            )
            for far in self.farthest
        )  # fmt: skip
        return (ReportSection("Farthest from the reference", _FAR, rows),) if rows else ()

    @property
    def own_fields(self) -> dict[str, Any]:
        reference = None if self.reference is None else plain(self.reference)
        return {"reference": reference, "fidelity": [plain(one) for one in self.found]}

    @property
    def own_parts(self) -> tuple[RenderableType, ...]:
        columns = heads("topology", "over", "KL", "95 %", "seen %", "top-1 %", "95 %", "PPL +%", text=("over",))
        rows = [
            (
                line.topology, line.over, line.kl, line.kl_interval, line.shared, line.agreement,
                line.agreement_interval, line.increase,
            )
            for line in self.lines
        ]  # fmt: skip
        caption = (
            "KL: nats a token, at least; seen: the reference's probability of the tokens that were compared one by "
            "one. top-1: the likeliest token is the same."
        )
        return (terminal_table(columns, rows, caption if rows else ""),)


def is_fidelity(run_dir: Path) -> bool:
    """Whether a run directory belongs to a run of ``trtx eval fidelity``."""
    return (run_dir / LOCK.file).exists() and LOCK.load(run_dir).get("check") == "fidelity"


def read_fidelity_view(run_dir: Path) -> FidelityData:
    asked = LOCK.read(run_dir, AskedFidelity)
    found = {label: read_fidelity(run_dir, label) for label in asked.topologies}
    compared = {label: read_compared(fidelity_directory(run_dir, label)) for label in asked.topologies}
    return FidelityData(
        **shared_of(run_dir),
        asked=asked,
        reference=REFERENCE.find(reference_directory(run_dir), ReferenceFacts),
        found=tuple(one for one in found.values() if one is not None),
        missing={label: len(compared[label]) for label, one in found.items() if one is None},
        farthest=tuple(far for label in asked.topologies for far in _farthest(label, compared[label])),
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


def render_fidelity(run_dir: Path) -> FidelityData:
    """Writes the files of the report, using only the directory's content."""
    return write_report(run_dir, read_fidelity_view(run_dir))
