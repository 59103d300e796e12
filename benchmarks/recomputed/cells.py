"""The cells of a run, and what was held against what."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recomputed.figures import (
    LATENCIES,
    PER_DEVICE,
    SAMPLES_NEEDED,
    SINCE,
    Figures,
    Request,
    cell_figures,
    read_requests,
    steady_span,
)
from recomputed.gpus import Gpus
from recomputed.intervals import mean_interval

DIGITS, INTERVAL_DIGITS = 12, 9
OTHER = "(not checked here)"  # a field that is no figure
UNKNOWN = "not recomputed: benchmarks/recomputed/figures.py has no such metric or percentile"


@dataclass
class Comparison:
    """What was held against what."""

    run: Path
    compared: int = 0
    mismatches: list[tuple[str, str, str, str]] = field(default_factory=list)  # file, field, says, recomputed

    def tree(self, file: str, where: str, says: Any, found: Any, digits: int = DIGITS) -> None:
        """Fields that one side lacks are mismatches; ``OTHER`` on ours is a field that is let pass."""
        if found == OTHER and isinstance(found, str):
            return
        if isinstance(says, dict) and isinstance(found, dict):
            for name in {**says, **found}:
                inner = f"{where}.{name}" if where else name
                if name not in found:
                    self.mismatches.append((file, inner, _text(says[name]), UNKNOWN))
                elif name not in says:
                    self.mismatches.append((file, inner, "not there", _text(found[name])))
                else:
                    self.tree(file, inner, says[name], found[name], digits)
            return
        self.compared += 1
        if not _same(says, found, digits):
            self.mismatches.append((file, where, _text(says), _text(found)))

    def table(self) -> str:
        rows = [("file", "what", "says", "recomputed"), *self.mismatches]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


@dataclass
class Cell:
    """One that has a ``cell.json``."""

    says: dict[str, Any]
    trials: dict[int, list[Request]]  # those that have a result
    recomputed: list[dict[str, Any]]  # of every trial: {"figures": …, "steady": …}
    parts: dict[str, Figures | None]  # over all trials

    def alone(self, trial: int) -> Cell:
        """As if it had one trial, by its place."""
        found = self.recomputed[trial]
        parts = {part: found[part] for part in self.parts}
        return Cell({**self.says, "trials_asked": 1}, {}, [found], parts)

    def number(self, part: str, name: str, statistic: str | None, trial: int | None = None) -> float | None:
        """One number of a figure, of the cell or of one trial by its place."""
        figures = (self.parts if trial is None else self.recomputed[trial])[part]
        if figures is None:
            return None
        if name in PER_DEVICE:
            total, devices = figures.get(PER_DEVICE[name]), self.says["device_count"]
            return None if total is None or not devices else float(total / devices)
        value = figures.get(name)
        found: float | None = value.get(statistic) if isinstance(value, dict) and statistic else value
        return found

    def interval(self, part: str, name: str, statistic: str | None) -> tuple[float, float] | None:
        """Over the trials; None where one has too few requests for the percentile, or lacks the number."""
        places = range(len(self.recomputed))
        values = [self.number(part, name, statistic, place) for place in places]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        if statistic and statistic.startswith("p"):
            counts = [self.recomputed[place][part][name]["count"] for place in places]
            if min(counts, default=0) < SAMPLES_NEEDED[int(statistic[1:])]:
                return None
        return mean_interval(known)


def check_cell(comparison: Comparison, directory: Path, lock: dict[str, Any]) -> Cell:
    file = f"cells/{directory.name}/cell.json"
    says = json.loads((directory / "cell.json").read_text(encoding="utf-8"))
    concurrency = None if lock["load"]["session_turn_delay_mean"] else says["load"]["concurrency"]
    cell = Cell(says, {}, [], {"figures": None, "steady": None})
    spans, of_gpus = [], []
    lying = {path.name for path in directory.glob("trial-[0-9]*") if path.name.removeprefix("trial-").isdigit()}
    for name in sorted(lying - {trial["directory"] for trial in says["trials"]}):
        comparison.mismatches.append((file, name, "not there", "a trial"))
    for trial in says["trials"]:
        path = directory / trial["directory"] / "profile_export.jsonl"
        requests, span, gpus = [], None, Gpus()
        if trial["failure"] is None:
            requests = read_requests(path)
            comparison.tree(file, f"{trial['directory']}: records", says["load"]["request_count"], len(requests))
            cell.trials[trial["number"]] = requests
            spans.append(span := steady_span(requests, concurrency))
            of_gpus.append(gpus := Gpus.of_trial(path.parent, says, lock.get("gpu_hour_price")))
        figures = _known(says, cell_figures([requests], [gpus])) if requests else None
        steady = _known(says, cell_figures([requests], [gpus], [span])) if span else None
        cell.recomputed.append({"figures": figures, "steady": steady})
        expected = {
            "number": OTHER, "directory": OTHER, "failure": OTHER,
            "figures": figures, "steady": steady, "status": _status(figures), "errors": OTHER,
        }  # fmt: skip
        comparison.tree(file, trial["directory"], trial, expected)
        if figures is not None:
            reasons = sum(count for _, count in trial["errors"])
            comparison.tree(file, f"{trial['directory']}.errors", reasons, figures["error_request_count"])
    if cell.trials:
        usable = list(cell.trials.values())
        cell.parts["figures"] = _known(says, cell_figures(usable, of_gpus))
        known = [span for span in spans if span is not None]
        cell.parts["steady"] = _known(says, cell_figures(usable, of_gpus, known)) if len(known) == len(usable) else None
    others = ("schema_version", "name", "topology", "load", "device", "device_count", "trials_asked", "trials")
    # By workers, which aiperf's records don't say, and texts.
    told = [name for name in ("pictures", "handoffs", "gpu_hour_price", "gpu_reasons", "drafts") if name in says]
    expected = {**dict.fromkeys((*others, *told, "validity"), OTHER), **cell.parts, "status": cell_status(cell)}
    comparison.tree(
        file,
        "",
        says,
        {**expected, **{name: cell.number("figures", name, None) for name in PER_DEVICE if name in says}},
    )
    return cell


def _known(says: dict[str, Any], figures: Figures) -> Figures:
    """The metrics and percentiles that existed when the cell was written."""
    version = says["schema_version"]
    known = {name: value for name, value in figures.items() if SINCE.get(name, 0) <= version}
    for name in LATENCIES.keys() & known.keys():
        later = {f"p{q}" for q, since in LATENCIES[name].percentiles.items() if since > version}
        known[name] = known[name] and {key: value for key, value in known[name].items() if key not in later}
    return known


def _status(figures: Figures | None) -> str:
    if figures is None:
        return "failed"
    return "errors" if figures["error_request_count"] else "uncounted" if figures["uncounted_request_count"] else "ok"


def cell_status(cell: Cell) -> str:
    found = [_status(trial["figures"]) for trial in cell.recomputed]
    worst = next((one for one in ("failed", "errors", "uncounted") if one in found), "ok" if found else "failed")
    return "incomplete" if worst in ("ok", "uncounted") and len(found) < cell.says["trials_asked"] else worst


def _same(says: Any, found: Any, digits: int) -> bool:
    if isinstance(says, bool) or isinstance(found, bool) or not isinstance(says, int | float):
        return bool(says == found)
    if not isinstance(found, int | float):
        return False
    return math.isclose(says, found, rel_tol=10.0**-digits, abs_tol=10.0**-digits)


def _text(value: Any) -> str:
    return "–" if value is None else str(value)
