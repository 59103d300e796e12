"""Renders a run of ``trtx eval parity``: each route's distance from the reference, its counters, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from trtx.bench.documents import DocumentKind, plain
from trtx.bench.journal import JournalEvent, TopologyReady, WorkerKilled, read_journal
from trtx.bench.judge.judgement import Verdict
from trtx.evals.parity import ComparedRoute, Parity, parity_directory, read_parity
from trtx.report.eval_report import (
    Conditions,
    EvalReport,
    ReportSection,
    machine_conditions,
    shared_of,
    write_report,
)
from trtx.report.tables import heads, terminal_table
from trtx.report.verdict import MISSING, verdict_style
from trtx.runs.forms import LOCK, Deployment, Provenance

SERVERS = DocumentKind("servers.json", version=1, oldest=1, since="")
_AGAIN = "again"  # suffix of the reference's name for its second pass
_WORST = 10  # number of requests per route listed on the page
_HANDS_OFF = "disagg"  # the only route affected by an injected fault
# For an attached server, whose internals aren't visible.
_UNCHECKED = "handoffs, migrations, prompts in several steps: not checked"
_ROUTES = heads(
    "route", "answered", "identical", "diverges at", "largest distance", "mean", "positions", "counted",
    text=("counted",),
)  # fmt: skip
_POSITIONS = "Positions: tokens of answers and of prompts that had the same tokens before them on both sides."


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
    def description(self) -> str:
        one = self.deployment
        made = " ".join(part for part in (one.server, one.server_version) if part)
        return f"{one.model} at {one.url}, {made or 'an unknown server'}"


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
class ParityView(EvalReport):
    """The data that all output formats of a run show."""

    asked: AskedParity
    parity: Parity | None  # None: the run ended before two passes could be compared
    servers: Mapping[str, KnownServer]  # attached servers by label

    kind = "parity of routes"
    judged = "route"

    @property
    def provenance(self) -> Provenance:
        return self.asked.provenance

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
            return "There is no noise floor, because the reference has no second pass."
        if found.floor == 0.0:
            return (
                f"Two identical runs of the reference: log-probabilities at most {found.largest:.2g} apart. Allowed "
                "for any route: 0, because --deterministic promises bitwise equal results."
            )
        floor = "" if found.floor is None else f", whose floor in {found.dtype} is {found.floor:.2g}"
        return (
            f"Two identical runs of the reference: log-probabilities at most {found.largest:.2g} apart, "
            f"{found.mean:.2g} on average. Allowed: {found.most:.2g}{floor}, and {found.most_mean:.2g} on average."
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """The most important notes for the reader."""
        notes = [*self.documents.notes]
        notes += [] if self.asked.fault is None else [self._fault_text(self.asked.fault)]
        notes += self.journal_notes
        compared = () if self.parity is None else tuple(one.route for one in self.parity.routes)
        notes += [f"{one}: it was not compared" for one in self.asked.topologies[1:] if one not in compared]
        notes += [f"{one.name}: {one.route.others.sentence}" for one in self.lines if one.route.others]
        lacking = [label for label, one in self.servers.items() if not one.gives_prompt_logprobs]
        notes += [f"{one}: it returns no log-probabilities of prompts, so none were compared" for one in lacking]
        unsalted = [label for label, one in self.servers.items() if not one.takes_nvext]
        notes += [f"{one}: it ignores the cache salt, so a pass may reuse KV of the pass before" for one in unsalted]
        return tuple(notes)

    def _fault_text(self, fault: str) -> str:
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
    def conditions(self) -> Conditions:
        asked = self.asked
        found = [
            ("requests", f"{asked.prompts} of at most {asked.isl} tokens, answers of {asked.osl}"),
            ("in flight", str(asked.concurrency)),
            ("seed", str(asked.seed)),
            (
                "engine",
                ", ".join(sorted({one.engine or MISSING for one in asked.provenance.measured.values()})) or MISSING,
            ),
        ]
        found += [(label, one.description) for label, one in self.servers.items()]
        if self.servers:
            found.append(("computed in", asked.dtype or MISSING))
        fault = (("fault", asked.fault),) if asked.fault is not None else ()
        return (*found, *machine_conditions(self), *fault)

    @property
    def sections(self) -> tuple[ReportSection, ...]:
        rows = tuple(
            (
                line.name, line.answered, line.identical, line.diverges, line.largest, line.mean, line.positions,
                line.counted,
            )
            for line in self.lines
        )  # fmt: skip
        return (ReportSection("Routes", _ROUTES, rows, f"{self.yardstick} {_POSITIONS}"),)

    @property
    def details(self) -> tuple[ReportSection, ...]:
        return tuple(
            ReportSection(
                f"{line.name}: farthest from the reference",
                heads("request", "part", "token", "distance", text=("part",)),
                tuple((str(one.index), one.part, str(one.position), f"{one.distance:.2g}") for one in line.worst),
            )
            for line in self.lines
            if line.worst
        )

    @property
    def own_fields(self) -> dict[str, Any]:
        """The content of ``parity.json``, but only the worst requests of each route."""
        routes = []
        for line in self.lines:
            compared = plain(line.route)["compared"]
            compared["worst"], compared["divergences"] = compared["worst"][:_WORST], compared["divergences"][:_WORST]
            routes.append({"name": line.name, **plain(line.route), "compared": compared})
        tolerance = None if self.parity is None or self.parity.tolerance is None else plain(self.parity.tolerance)
        return {"tolerance": tolerance, "routes": routes}

    @property
    def own_parts(self) -> tuple[RenderableType, ...]:
        columns = heads(
            "route", "answered", "identical", "diverges at", "largest", "mean", "verdict", text=("verdict",)
        )
        rows = [
            (
                line.name, line.answered, line.identical, line.diverges, line.largest, line.mean,
                _verdict_text(line.verdict),
            )
            for line in self.lines
        ]  # fmt: skip
        counted = [Text(f"{line.name}: {line.counted}") for line in self.lines]
        return (terminal_table(columns, rows), Text(), Text(self.yardstick), *counted)


def is_parity(run_dir: Path) -> bool:
    """Whether a run directory belongs to a run of ``trtx eval parity``."""
    return (run_dir / LOCK.file).exists() and "routes" in LOCK.load(run_dir)


def read_parity_view(run_dir: Path) -> ParityView:
    shared, journal = shared_of(run_dir), read_journal(run_dir)
    kills = tuple(
        f"{one.topology}: this run killed {one.worker} while {one.open_requests} streams were open there"
        for one in _of_last_starts(journal)
        if isinstance(one, WorkerKilled)
    )
    servers = SERVERS.find(parity_directory(run_dir), KnownServers)
    return ParityView(
        **{**shared, "journal_notes": kills + shared["journal_notes"]},
        asked=LOCK.read(run_dir, AskedParity),
        parity=read_parity(run_dir),
        servers={} if servers is None else servers.servers,
    )


def _of_last_starts(journal: Sequence[JournalEvent]) -> Iterator[JournalEvent]:
    """For each topology, the events after its last start: an aborted pass is repeated, including its kill."""
    last = {one.topology: place for place, one in enumerate(journal) if isinstance(one, TopologyReady)}
    for place, one in enumerate(journal):
        if place >= last.get(getattr(one, "topology", ""), 0):
            yield one


def render_parity(run_dir: Path) -> ParityView:
    """Writes the files of the report, using only the directory's content."""
    return write_report(run_dir, read_parity_view(run_dir))


def _verdict_text(verdict: Verdict | None) -> Text:
    return Text(MISSING) if verdict is None else Text(verdict.value, verdict_style(verdict))
