"""Renders a run of ``trtx eval parity``: each route's distance from the reference, its counters, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from rich.console import Group, RenderableType
from rich.text import Text

from trtx.bench.documents import Document, plain
from trtx.bench.files import name_of, write_text
from trtx.bench.intact import KeptDocuments, read_kept_documents
from trtx.bench.journal import Event, TopologyReady, WorkerKilled, read_journal
from trtx.bench.judge.judgement import Verdict
from trtx.evals.parity import ComparedRoute, Parity, parity_directory, read_parity
from trtx.report.junit import scores_junit_xml
from trtx.report.left_out import left_out_conditions
from trtx.report.notes import notes_of
from trtx.report.verdict import MISSING, headline, lines, markdown_line, table_cell, verdict_json, verdict_markdown
from trtx.report.whole_table import WholeTable
from trtx.runs.forms import LOCK, SUMMARY, VERDICT, Deployment, Provenance, RunVerdict

SERVERS = Document("servers.json", version=1, oldest=1, since="")
_STYLE = {Verdict.PASS: "green", Verdict.NO_VERDICT: "yellow"}
_AGAIN = "again"  # suffix of the reference's name for its second pass
_WORST = 10  # number of requests per route listed on the page
_HANDS_OFF = "disagg"  # the only route affected by an injected fault
# For an attached server, whose internals aren't visible.
_UNCHECKED = "handoffs, migrations, prompts in several steps: not checked"


@dataclass(frozen=True, slots=True)
class AskedParity:
    """The part of the run's manifest that reports use."""

    topologies: tuple[str, ...]  # labels, starting with the reference
    prompts: int
    isl: int
    osl: int
    concurrency: int
    seed: int
    fault: str | None
    provenance: Provenance
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class KnownServer:
    """An attached server, with its published information and its capabilities."""

    deployment: Deployment
    takes_nvext: bool
    gives_prompt_logprobs: bool

    @property
    def told(self) -> str:
        one = self.deployment
        made = " ".join(part for part in (one.server, one.server_version) if part)
        return f"{one.model} at {one.url}, {made or 'by a server that does not say what it is'}"


@dataclass(frozen=True, slots=True)
class KnownServers:
    """Content of ``eval/servers.json``, by label."""

    servers: dict[str, KnownServer]


@dataclass(frozen=True, slots=True)
class RouteLine:
    """One route, prepared for display."""

    name: str
    route: ComparedRoute
    verdict: Verdict | None  # the worst of its judgements; None: not judged

    @property
    def answered(self) -> str:
        return f"{self.route.sent - len(self.route.failures)}/{self.route.sent}"

    @property
    def identical(self) -> str:
        found = self.route.compared
        return f"{found.identical}/{found.requests}" if found.requests else MISSING

    @property
    def diverges(self) -> str:
        """The first position, over all requests, at which an answer's token differs."""
        found = [one.position for one in self.route.compared.divergences]
        return str(min(found)) if found else MISSING

    @property
    def largest(self) -> str:
        worst = self.route.compared.worst
        return f"{worst[0].distance:.2g}" if worst else MISSING

    @property
    def mean(self) -> str:
        return f"{self.route.compared.mean_distance:.2g}" if self.route.compared.requests else MISSING

    @property
    def positions(self) -> str:
        return f"{self.route.compared.answer_positions} + {self.route.compared.prompt_positions}"

    @property
    def counted(self) -> str:
        counts = [f"{one.what}: {MISSING if one.value is None else one.value}" for one in self.route.evidence.counts]
        counts += [] if self.route.evidence.is_checked else [_UNCHECKED]
        return "; ".join([*counts, f"cancelled by their client: {self.route.cancelled}"])

    @property
    def worst(self) -> tuple[Any, ...]:
        return self.route.compared.worst[:_WORST]


@dataclass(frozen=True, slots=True)
class ParityView:
    """The data that all output formats of a run show."""

    name: str
    asked: AskedParity
    parity: Parity | None  # None: the run ended before two passes could be compared
    verdict: RunVerdict | None
    told: tuple[str, ...]  # notes from the journal
    documents: KeptDocuments  # whether the underlying files have changed
    servers: Mapping[str, KnownServer]  # attached servers by label

    @property
    def model(self) -> str:
        return next((one.model for one in self.asked.provenance.measured.values()), MISSING)

    @property
    def lines(self) -> tuple[RouteLine, ...]:
        return tuple(self._lines())

    def _lines(self) -> Iterator[RouteLine]:
        if self.parity is None:
            return
        if (again := self.parity.reference) is not None:
            yield RouteLine(f"{again.route} {_AGAIN}", again, self._worst_of(again.route))
        for route in self.parity.routes:
            yield RouteLine(route.route, route, self._worst_of(route.route))

    def _worst_of(self, route: str) -> Verdict | None:
        found = [one.verdict for one in self.verdict.judgements if one.cell == route] if self.verdict else []
        return next((one for one in Verdict if one in found), None)

    @property
    def yardstick(self) -> str:
        found = None if self.parity is None else self.parity.tolerance
        if found is None:
            return "There is no yardstick: the reference was not answered twice."
        if found.floor == 0.0:
            return (
                f"Two identical runs of the reference: log-probabilities at most {found.largest:.2g} apart. Allowed of "
                "any route: 0, as --deterministic promises the same bits."
            )
        floor = "" if found.floor is None else f", whose floor in {found.dtype} is {found.floor:.2g}"
        return (
            f"Two identical runs of the reference: log-probabilities at most {found.largest:.2g} apart, "
            f"{found.mean:.2g} on average. Allowed: {found.most:.2g}{floor}, and {found.most_mean:.2g} on average."
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """The most important notes for the reader."""
        told = [*self.documents.notes]
        told += [] if self.asked.fault is None else [self._fault_told(self.asked.fault)]
        told += self.told
        compared = () if self.parity is None else tuple(one.route for one in self.parity.routes)
        told += [f"{one}: it was not compared" for one in self.asked.topologies[1:] if one not in compared]
        told += [f"{one.name}: {one.route.others.sentence}" for one in self.lines if one.route.others]
        lacking = [label for label, one in self.servers.items() if not one.gives_prompt_logprobs]
        told += [f"{one}: it gives no log-probabilities of prompts, so none were compared" for one in lacking]
        unsalted = [label for label, one in self.servers.items() if not one.takes_nvext]
        told += [f"{one}: it takes no salt for its cache, so a pass may find KV of the one before" for one in unsalted]
        return tuple(told)

    def _fault_told(self, fault: str) -> str:
        counts = [one.evidence.corrupted for one in self.parity.routes] if self.parity is not None else []
        known = [one for one in counts if one is not None]
        if any(known):
            return (
                f"KV WAS CORRUPTED ON PURPOSE in {sum(known)} handoffs (TRTX_FAULT={fault}): this run tests the check"
            )
        if known or _HANDS_OFF not in self.asked.topologies:
            return f"TRTX_FAULT={fault} corrupted no handoff: this run tests nothing"
        return f"KV MAY HAVE BEEN CORRUPTED ON PURPOSE (TRTX_FAULT={fault}): in how many handoffs was not counted"

    @property
    def conditions(self) -> tuple[tuple[str, str], ...]:
        asked, here = self.asked, self.asked.provenance.environment
        found = [
            ("requests", f"{asked.prompts} of at most {asked.isl} tokens, answers of {asked.osl}"),
            ("in flight", str(asked.concurrency)),
            ("seed", str(asked.seed)),
            ("engine", ", ".join(sorted({one.engine or MISSING for one in asked.provenance.measured.values()}))),
            ("machine", here.cpu),
        ]
        found += [(label, one.told) for label, one in self.servers.items()]
        if self.servers:
            found.append(("computed in", self.asked.dtype or MISSING))
        if here.gpus:
            found.append(("GPUs", ", ".join(gpu.name for gpu in here.gpus)))
        found += left_out_conditions(self.asked.provenance)
        found.append(("files", self.documents.told))
        return tuple(found + ([("fault", asked.fault)] if asked.fault is not None else []))


def is_parity(run_dir: Path) -> bool:
    """Whether a run directory belongs to a run of ``trtx eval parity``."""
    return (run_dir / LOCK.file).exists() and "routes" in LOCK.load(run_dir)


def read_parity_view(run_dir: Path) -> ParityView:
    journal = read_journal(run_dir)
    kills = tuple(
        f"{one.topology}: this run killed {one.worker} while {one.open_requests} streams were open there"
        for one in _of_last_starts(journal)
        if isinstance(one, WorkerKilled)
    )
    servers = SERVERS.find(parity_directory(run_dir), KnownServers)
    return ParityView(
        name=name_of(run_dir),
        asked=LOCK.read(run_dir, AskedParity),
        parity=read_parity(run_dir),
        verdict=VERDICT.find(run_dir, RunVerdict),
        told=kills + notes_of(journal),
        documents=read_kept_documents(run_dir),
        servers={} if servers is None else servers.servers,
    )


def _of_last_starts(journal: Sequence[Event]) -> Iterator[Event]:
    """For each topology, the events after its last start: an aborted pass is repeated, including its kill."""
    last = {one.topology: place for place, one in enumerate(journal) if isinstance(one, TopologyReady)}
    for place, one in enumerate(journal):
        if place >= last.get(getattr(one, "topology", ""), 0):
            yield one


def render_parity(run_dir: Path) -> ParityView:
    """Writes ``summary.json``, ``summary.md``, ``junit.xml`` and ``report.html``, using only the directory's
    content.
    """
    view = read_parity_view(run_dir)
    SUMMARY.write(run_dir, parity_fields(view))
    write_text(run_dir / "summary.md", parity_markdown(view))
    write_text(run_dir / "junit.xml", scores_junit_xml(view.name, view.verdict))
    write_text(run_dir / "report.html", _page(view))
    return view


def parity_fields(view: ParityView) -> dict[str, Any]:
    """The fields of ``summary.json``: the content of ``parity.json``, but only the worst requests of each route."""
    routes = []
    for line in view.lines:
        compared = plain(line.route)["compared"]
        compared["worst"], compared["divergences"] = compared["worst"][:_WORST], compared["divergences"][:_WORST]
        routes.append({"name": line.name, **plain(line.route), "compared": compared})
    return {
        "run": view.name,
        "model": view.model,
        "conditions": dict(view.conditions),
        "notes": list(view.notes),
        "tolerance": None if view.parity is None or view.parity.tolerance is None else plain(view.parity.tolerance),
        "verdict": verdict_json(view.verdict),
        "routes": routes,
    }


def parity_table(view: ParityView) -> RenderableType:
    """A terminal table for 80 columns."""
    table = WholeTable()
    table.add_column("route", no_wrap=True)
    for name in ("answered", "identical", "diverges at", "largest", "mean"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for line in view.lines:
        verdict = Text(MISSING) if line.verdict is None else _verdict_text(line.verdict)
        table.add_row(line.name, line.answered, line.identical, line.diverges, line.largest, line.mean, verdict)
    told: list[RenderableType] = [table, Text(), Text(view.yardstick)]
    told += [Text(f"{line.name}: {line.counted}") for line in view.lines]
    if view.notes:
        told += [Text(), *(Text(note, "yellow") for note in view.notes)]
    if view.verdict is not None:
        told += [Text(), Text(headline(view.verdict), _STYLE.get(view.verdict.verdict, "bold red"))]
    return Group(*told)


def _verdict_text(verdict: Verdict) -> Text:
    return Text(verdict.value, _STYLE.get(verdict, "bold red"))


def parity_markdown(view: ParityView) -> str:
    rows = [
        f"| {line.name} | {line.answered} | {line.identical} | {line.diverges} | {line.largest} | {line.mean} | "
        f"{line.positions} | {table_cell(line.counted)} |"
        for line in view.lines
    ]
    text = [
        f"# {view.model}: parity of routes",
        "",
        "; ".join(f"{name}: {value}" for name, value in view.conditions) + ".",
        "",
        "| route | answered | identical | diverges at | largest | mean | positions | counted |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
        *rows,
        "",
        view.yardstick,
        *(["", *(f"- {markdown_line(note)}" for note in view.notes)] if view.notes else []),
        *verdict_markdown(view.verdict),
    ]
    return "\n".join(text) + "\n"


def _page(view: ParityView) -> str:
    judged = () if view.verdict is None else lines(view.verdict)
    return _template().render(view=view, judged=judged, headline=view.verdict and headline(view.verdict))


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((resources.files("trtx.report") / "parity.html.j2").read_text(encoding="utf-8"))
