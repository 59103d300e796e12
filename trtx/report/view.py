"""A run directory as one value: rows, conditions, notes. Everything that renders starts from it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from trtx.bench import Cell, Distribution, Figures, Range, Reasons, describe, read_cells, read_journal
from trtx.report.record import read_json, read_record

Status = Literal["ok", "uncounted", "errors", "failed", "missing"]
NOT_KNOWN = "not known"
_ENDED_EARLY = "The run ended early"
# A prompt is cut from text, and the chat template put around it: merges at the seams make it a token or two longer or
# shorter. The share: aiperf 0.13.0's own, from which on its count and the server's disagree (USAGE_PCT_DIFF_THRESHOLD).
_ISL_TOLERANCE, _ISL_TOLERANCE_SHARE = 2, 0.1  # tokens, of what was asked


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a cell, or the place of one that was never measured."""

    mode: str
    concurrency: int
    cell: Cell | None
    asked_isl: int | None = None  # tokens; None: not known

    @property
    def name(self) -> str:
        return f"{self.mode}-c{self.concurrency}"

    @property
    def status(self) -> Status:
        return "missing" if self.cell is None else self.cell.status

    @property
    def figures(self) -> Figures | None:
        return None if self.cell is None else self.cell.figures

    def rate(self, name: str) -> float | None:
        """A figure of :class:`Figures` that is one number, by its name."""
        value: float | None = getattr(self.figures, name, None)
        return value

    def latency(self, name: str) -> Distribution | None:
        """A figure of :class:`Figures` that is a distribution, by its name."""
        value: Distribution | None = getattr(self.figures, name, None)
        return value

    @property
    def per_device(self) -> float | None:
        return None if self.cell is None else self.cell.output_token_throughput_per_device

    @property
    def problem(self) -> str | None:
        """One sentence, when something is wrong with this row."""
        if self.cell is None:
            return "not measured: the run ended before it"
        if self.cell.failure is not None:
            return self.cell.failure
        failed = f"{self.failed_text}: {describe(self.failures)}" if self.failed_text else None
        return "; ".join(text for text in (failed, self.uncounted_text, self.isl_text) if text) or None

    @property
    def failures(self) -> Reasons:
        """Why requests of a measured cell failed, most frequent first."""
        return self.cell.errors if self.cell is not None and self.figures is not None else ()

    @property
    def failed_text(self) -> str | None:
        """How many requests failed, when some did."""
        if self.figures is None or not self.figures.error_request_count:
            return None
        failed = self.figures.error_request_count
        return f"{failed:,} of {failed + self.figures.request_count:,} failed"

    @property
    def uncounted_text(self) -> str | None:
        """How many answers nobody counted the tokens of, when some were such."""
        if self.figures is None or not self.figures.uncounted_request_count:
            return None
        uncounted, answers = self.figures.uncounted_request_count, self.figures.request_count
        return f"{uncounted:,} of {answers:,} answers carry no usage: what takes tokens can't be computed"

    @property
    def isl_text(self) -> str | None:
        """How long prompts were, when one was not about as long as asked: truncated, or mostly a chat template."""
        counted = self.figures.input_sequence_lengths if self.figures else None
        if counted is None or self.asked_isl is None:
            return None
        tolerated = max(_ISL_TOLERANCE, _ISL_TOLERANCE_SHARE * self.asked_isl)
        if max(self.asked_isl - counted.min, counted.max - self.asked_isl) <= tolerated:
            return None
        return f"the server counted prompts of {_counted_tokens(counted)} tokens, {self.asked_isl:,} were asked"


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing that the figures depend on."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class RunView:
    """A run, ready to be shown."""

    name: str  # of the directory
    model: str
    rows: tuple[Row, ...]
    device: Literal["GPU", "worker"]  # what tokens/s is divided by
    conditions: tuple[Condition, ...]
    topologies: tuple[tuple[str, str], ...]  # mode, what served it
    notes: tuple[str, ...]  # restarts, an early end: whatever a reader must know beside the figures
    started_at: datetime | None
    subtitle: str  # engine and machine, short

    @property
    def modes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.mode for row in self.rows))

    @property
    def requests_sent(self) -> int:
        return sum(f.request_count + f.error_request_count for row in self.rows if (f := row.figures))

    @property
    def requests_failed(self) -> int:
        return sum(f.error_request_count for row in self.rows if (f := row.figures))

    @property
    def answers_uncounted(self) -> int:
        return sum(f.uncounted_request_count for row in self.rows if (f := row.figures))

    @property
    def is_clean(self) -> bool:
        return bool(self.rows) and all(row.status == "ok" and not row.problem for row in self.rows) and not self.notes


def read_run(run_dir: Path) -> RunView:
    """Reads cells, journal, ``run.lock.yaml``, ``plan.json``, ``env.json``; what a missing one knew is left out.

    Raises UsageError for one that was cut short or is another's.
    """
    lock = read_record(run_dir / "run.lock.yaml")
    plans: dict[str, Any] = read_json(run_dir / "plan.json").get("modes", {})
    env = read_json(run_dir / "env.json")
    journal = read_journal(run_dir)
    cells = read_cells(run_dir)
    started = env.get("started_at")
    plan: dict[str, Any] = next(iter(plans.values()), {})
    return RunView(
        name=run_dir.resolve().name,
        model=plan.get("model") or (lock.get("attach") or {}).get("model") or _swept_model(journal) or NOT_KNOWN,
        rows=_rows(lock, cells),
        device="GPU" if any(cell.device == "gpu" for cell in cells) else "worker",
        conditions=_conditions(lock, plan, env, journal, cells),
        topologies=tuple((mode, _topology(entry)) for mode, entry in plans.items()),
        notes=_notes(journal),
        started_at=datetime.fromisoformat(started) if started else None,
        subtitle=", ".join(part for part in (_engine(plan, lock), _machine(env)) if part),
    )


def _rows(lock: dict[str, Any], cells: tuple[Cell, ...]) -> tuple[Row, ...]:
    measured = {(cell.mode, cell.concurrency): cell for cell in cells}
    modes = ["attached"] if lock.get("attach") else lock.get("modes", [])
    asked = [(mode, c) for mode in modes for c in lock.get("load", {}).get("concurrency", [])]
    keys = sorted({*asked, *measured}, key=lambda key: (key[0], key[1]))
    isl = lock.get("load", {}).get("isl")
    return tuple(Row(mode, concurrency, measured.get((mode, concurrency)), isl) for mode, concurrency in keys)


def _conditions(
    lock: dict[str, Any],
    plan: dict[str, Any],
    env: dict[str, Any],
    journal: tuple[dict[str, Any], ...],
    measured: tuple[Cell, ...],
) -> tuple[Condition, ...]:
    load = lock.get("load", {})
    cells = load.get("cells", [])
    found = [
        ("Command", env.get("command")),
        ("Model", plan.get("model") or _swept_model(journal)),
        ("Engine", _engine(plan, lock)),
        ("GPUs", ", ".join(_counted(plan.get("gpu_names", []))) or ("none" if plan else None)),
        ("GPU driver", env.get("gpu_driver")),
        ("CPU", env.get("cpu") and f"{env['cpu']}, {env.get('cpu_cores')} cores"),
        ("Memory", env.get("memory_bytes") and f"{env['memory_bytes'] / 2**30:.0f} GiB"),
        ("Load average before", env.get("load_average")),
        ("ISL / OSL", load and _lengths(load, measured)),
        ("Requests", ", ".join(f"{c['request_count']} at {c['concurrency']}" for c in cells)),
        ("Warm-up", ", ".join(f"{c['warmup_request_count']} at {c['concurrency']}" for c in cells)),
        ("Trials", load.get("trials")),
        ("Seed", load.get("seed")),
        ("Streaming", load and ("yes" if load["streaming"] else "no")),
        ("Started", env.get("started_at")),
        ("Resumed", _resumptions(journal)),
        ("Commit", env.get("commit")),
        ("Versions", ", ".join(f"{name} {version}" for name, version in env.get("versions", {}).items())),
        ("Python", env.get("python")),
        ("Platform", env.get("platform")),
        ("Time to load", _times(journal, "load_seconds")),
    ]
    return tuple(Condition(name, str(value)) for name, value in found if value not in (None, "", {}))


def _lengths(load: dict[str, Any], cells: tuple[Cell, ...]) -> str:
    """Both lengths that were asked, each with what the server counted of it."""
    figures = [cell.figures for cell in cells]
    isl = _length(load["isl"], [found.input_sequence_lengths if found else None for found in figures])
    osl = _length(load["osl"], [found.output_sequence_lengths if found else None for found in figures])
    return f"{isl} / {osl if load['ignore_eos'] else f'at most {osl}'} tokens"


def _length(asked: int, counted: list[Range | None]) -> str:
    """A number asked, "exact" only where every answer of every cell was counted and is so long."""
    known = [found for found in counted if found is not None]
    if not known or len(known) < len(counted):
        return f"{asked} asked"
    over_all = Range(min(found.min for found in known), max(found.max for found in known))
    if over_all == Range(asked, asked):
        return f"{asked} exact"
    return f"{asked} asked ({_counted_tokens(over_all)} counted)"


def _counted_tokens(counted: Range) -> str:
    least, most = f"{counted.min:,.0f}", f"{counted.max:,.0f}"
    return least if least == most else f"{least} to {most}"


def _engine(plan: dict[str, Any], lock: dict[str, Any]) -> str:
    if plan:
        return f"{plan['engine']} engine"
    return f"attached to {lock['attach']['url']}" if lock.get("attach") else ""


def _machine(env: dict[str, Any]) -> str:
    gpus = _counted([gpu["name"] for gpu in env.get("gpus", [])])
    return ", ".join(gpus) if gpus else f"{env['cpu']}, {env['cpu_cores']} cores" if env.get("cpu") else ""


def _topology(plan: dict[str, Any]) -> str:
    parts = []
    for role in ("agg", "prefill", "decode"):
        workers = [process for process in plan["processes"] if process["role"] == role]
        if workers:
            gpus = sorted({index for worker in workers for index in worker["gpu_indices"]})
            on = f" on GPU {', '.join(map(str, gpus))}" if gpus else ""
            parts.append(f"{len(workers)} {role} worker{'s' if len(workers) > 1 else ''}{on}")
    return " + ".join(parts)


def _notes(journal: tuple[dict[str, Any], ...]) -> tuple[str, ...]:
    notes: list[str] = []
    for event in journal:
        if event["event"] == "topology_stopping" and event["restarts"]:
            deaths = ", ".join(f"{restart['name']} ({restart['exit']})" for restart in event["restarts"])
            count = len(event["restarts"])
            notes.append(
                f"{event['mode']}: {count} restart{'s' if count > 1 else ''} while it was measured: {deaths}. "
                "Its figures include them."
            )
        if event["event"] == "run_resumed":
            notes = [note for note in notes if not note.startswith(_ENDED_EARLY)]
        if event["event"] == "run_failed":
            notes.append(f"{_ENDED_EARLY}: {event['error']}")
    return tuple(notes)


def _resumptions(journal: tuple[dict[str, Any], ...]) -> str:
    """When a run that had ended early went on, and with which cells."""
    return "; ".join(
        f"{datetime.fromtimestamp(event['time'], UTC).isoformat(timespec='seconds')} for "
        f"{', '.join(event['missing']) or 'nothing'}"
        for event in journal
        if event["event"] == "run_resumed"
    )


def _times(journal: tuple[dict[str, Any], ...], name: str) -> str:
    return ", ".join(f"{event['mode']} {event[name]:.1f} s" for event in journal if name in event)


def _swept_model(journal: tuple[dict[str, Any], ...]) -> str | None:
    return next((event["model"] for event in journal if event["event"] == "sweep_started"), None)


def _counted(names: list[str]) -> list[str]:
    return [f"{names.count(name)}× {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
