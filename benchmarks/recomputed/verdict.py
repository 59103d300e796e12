"""``verdict.json``: each number that was judged, its interval, and what follows from them."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recomputed.cells import INTERVAL_DIGITS, Cell, Comparison
from recomputed.figures import LATENCIES, goodput, mean
from recomputed.intervals import CONFIDENCE, mean_interval, ratio_interval

FILE = "verdict.json"
COMPARED = ("output_token_throughput", "time_to_first_token:p50", "inter_token_latency:p50")  # without --metrics
HOLDS: Mapping[str, Callable[[float, float], bool]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
EXIT_CODES = {"failed": 1, "missed": 1, "regressed": 1, "no verdict": 3, "pass": 0}  # in the order in which they count


def check_verdict(comparison: Comparison, lock: dict[str, Any], cells: dict[str, Cell]) -> None:
    """A judgement without a value says why there is none, and is not a number of ours."""
    says = json.loads((comparison.run / FILE).read_text(encoding="utf-8"))
    for judgement in says["judgements"]:
        if judgement["value"] is None:
            continue
        where, cell = f"{judgement['cell']} {judgement['criterion']}", cells[judgement["cell"]]
        figure, _, rest = judgement["criterion"].partition(":")
        statistic, _, bound = rest.partition(":")
        if bound:
            expected = _bound(cell, figure, statistic, bound, lock["gate"])
        else:
            expected = _ratio(comparison.run, cell, figure, statistic, lock, cells)
        found = {name: judgement[name] for name in expected}
        comparison.tree(FILE, where, found, expected, INTERVAL_DIGITS)
    verdicts = [judgement["verdict"] for judgement in says["judgements"]]
    worst = next((verdict for verdict in EXIT_CODES if verdict in verdicts), "no verdict")
    comparison.tree(FILE, "verdict", says["verdict"], worst)
    failed = any(cell.says["status"] == "failed" for cell in cells.values())
    comparison.tree(FILE, "exit_code", says["exit_code"], 5 if failed else EXIT_CODES[worst])


def _bound(cell: Cell, figure: str, statistic: str, bound: str, gate: dict[str, Any]) -> dict[str, Any]:
    comparator, _, text = bound.partition(":")
    limit = float(text)
    if figure == "goodput":
        values = [goodput(trial, _latency_bounds(gate["slo"])) for trial in cell.trials.values()]
        value = None if None in values else mean([one for one in values if one is not None])
    else:
        values = [cell.number("figures", figure, statistic, place) for place in range(len(cell.recomputed))]
        value = cell.number("figures", figure, statistic)
    known = [one for one in values if one is not None]
    ends = mean_interval(known) if len(known) == len(values) else None
    if figure == "uncounted_request_count":  # no bound that anybody asked for: it says why there is no verdict
        return {"value": value, "limit": limit, "interval": None, "verdict": "no verdict"}
    return {
        "value": value,
        "limit": limit,
        "interval": ends and _interval(mean(known), *ends, CONFIDENCE),
        "verdict": "pass" if value is not None and HOLDS[comparator](value, limit) else "missed",
    }


def _latency_bounds(slo: list[str]) -> dict[str, Callable[[float], bool]]:
    """Of several bounds of one latency, the widest."""
    widest: dict[str, tuple[float, str]] = {}
    for figure, _, comparator, text in (one.split(":") for one in slo):
        if figure in LATENCIES and float(text) > widest.get(figure, (float("-inf"), ""))[0]:
            widest[figure] = (float(text), comparator)
    return {figure: _bounded(*bound) for figure, bound in widest.items()}


def _bounded(limit: float, comparator: str) -> Callable[[float], bool]:
    return lambda value: HOLDS[comparator](value, limit)


def _ratio(
    run: Path, cell: Cell, figure: str, statistic: str, lock: dict[str, Any], cells: dict[str, Cell]
) -> dict[str, Any]:
    """candidate / baseline, or B / A of an A/B run by its rounds."""
    gate, loads = lock["gate"], lock["load"]["cells"]
    paired = lock["order"] == "abba" and gate["baseline"] in lock["topologies"]
    if paired:
        other = cells[f"{gate['baseline']}-{cell.says['load']['label']}"]
    else:
        kept = json.loads((run / "baseline.json").read_text(encoding="utf-8"))
        (says,) = (one for one in kept["cells"] if one["name"] == cell.says["name"])
        other = Cell(says, {}, says["trials"], {"figures": says["figures"], "steady": says["steady"]})
    judged = (len(lock["topologies"]) - paired) * len(loads)
    confidence = 1 - (1 - CONFIDENCE) / (judged * len(gate["metrics"] or COMPARED))
    found = ratio_interval(
        _values(cell, figure, statistic), _values(other, figure, statistic), confidence, paired=paired
    )
    if found is None:
        return {"value": None}
    share = float(gate["max_regression"].removesuffix("%")) / 100
    ratio, low, high = found
    if figure in LATENCIES:
        limit = 1 + share
        verdict = "regressed" if low > limit else "pass" if high <= limit else "no verdict"
    else:
        limit = 1 - share
        verdict = "regressed" if high < limit else "pass" if low >= limit else "no verdict"
    return {"value": ratio, "limit": limit, "interval": _interval(ratio, low, high, confidence), "verdict": verdict}


def _values(cell: Cell, figure: str, statistic: str) -> list[float]:
    values = [cell.number("figures", figure, statistic, place) for place in range(len(cell.recomputed))]
    return [value for value in values if value is not None]


def _interval(estimate: float, low: float, high: float, confidence: float) -> dict[str, float]:
    return {"estimate": estimate, "low": low, "high": high, "confidence": confidence}
