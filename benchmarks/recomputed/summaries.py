"""``summary.json``, ``summary.csv``, ``summary.parquet`` and the table of ``summary.md``."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from recomputed.cells import DIGITS, INTERVAL_DIGITS, OTHER, Cell, Comparison, cell_status
from recomputed.figures import LATENCIES, NUMBERS, SAMPLES_NEEDED

PARTS = {"figures": "", "steady": "steady_"}


def check_summaries(comparison: Comparison, lock: dict[str, Any], cells: dict[str, Cell]) -> None:
    names = [f"{label}-{load['label']}" for label in lock["topologies"] for load in lock["load"]["cells"]]
    device = "gpu" if any(cell.says["device"] == "gpu" for cell in cells.values()) else "worker"
    has_images = bool(lock["load"].get("image_batch_size"))
    known = {
        name
        for name in NUMBERS
        for cell in cells.values()
        if any(cell.number(part, name, None) is not None for part in PARTS)
    }
    shown = [
        name
        for name, one in NUMBERS.items()
        if one.has_interval and (has_images or not one.of_images) and (name in known or not one.if_known)
    ]
    expected = {name: _row(cells.get(name), device, shown) for name in names}
    run = comparison.run
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    rows = {f"{row['topology']}-{row['load']}": row for row in summary["rows"]}
    for name in {**expected, **rows}:
        _check_row(comparison, "summary.json", name, rows.get(name), expected.get(name))
        told = sum(one["count"] for one in summary["failures"].get(name, ()))
        failed = (expected.get(name) or {}).get("error_request_count") or 0
        comparison.tree("summary.json", f"failures of {name}", told, failed)
    text = pd.read_csv(run / "summary.csv", keep_default_na=False, na_values=[""], float_precision="round_trip")
    # CSV has nothing for null beside "".
    in_text = {
        name: {key: None if value == "" else value for key, value in row.items()} for name, row in expected.items()
    }
    _check_table(comparison, "summary.csv", text, in_text)
    of_cells = {name: {"scope": "cell", "trial": None, **row} for name, row in expected.items()}
    of_trials = {
        f"{name} trial {says['number']}": {"scope": "trial", "trial": says["number"], **_row(alone, device, shown)}
        for name, cell in cells.items()
        for says, alone in zip(cell.says["trials"], map(cell.alone, range(len(cell.recomputed))), strict=True)
    }
    _check_table(comparison, "summary.parquet", pd.read_parquet(run / "summary.parquet"), {**of_cells, **of_trials})
    _check_markdown(comparison, (run / "summary.md").read_text(encoding="utf-8"), cells, names, device)


def _check_table(comparison: Comparison, file: str, table: pd.DataFrame, expected: dict[str, dict[str, Any]]) -> None:
    known = table.astype(object).where(table.notna(), None)
    names = known["topology"] + "-" + known["load"]
    if "trial" in known:
        names += known["trial"].map(lambda number: "" if number is None else f" trial {number}")
    rows = dict(zip(names, known.to_dict("records"), strict=True))
    for name in {**expected, **rows}:
        _check_row(comparison, file, name, rows.get(name), expected.get(name))


def _check_row(comparison: Comparison, file: str, name: str, says: Any, found: dict[str, Any] | None) -> None:
    if says is None or found is None:
        comparison.tree(file, name, "a row" if says else "no row", "a row" if found else "no row")
        return
    ends = {key for key in found if key.endswith(("_low", "_high"))}
    for digits, keys in ((DIGITS, {*says, *found} - ends), (INTERVAL_DIGITS, ends)):
        mine, theirs = ({key: row[key] for key in row if key in keys} for row in (found, says))
        comparison.tree(file, name, theirs, mine, digits)


def _row(cell: Cell | None, device: str, with_interval: Sequence[str]) -> dict[str, Any]:
    """A row of the summaries."""
    asked = ("topology", "concurrency", "request_rate", "isl", "osl", "warmup_request_count", "load")
    row: dict[str, Any] = dict.fromkeys((*asked, "validity", "validity_reasons", "not_checked", "problem"), OTHER)
    row |= {
        "request_count_asked": cell.says["load"]["request_count"] if cell else OTHER,
        "trials": len(cell.recomputed) if cell else 0,
        "trials_asked": cell.says["trials_asked"] if cell else None,
        "status": cell_status(cell) if cell else "missing",
    }
    for part, prefix in PARTS.items():
        shown: list[tuple[str, str | None, str]] = [(name, None, name) for name in NUMBERS]
        for name, latency in LATENCIES.items():
            shown += [(name, one, f"{name}_{one}") for one in ("avg", *(f"p{q}" for q in latency.percentiles))]
        for name, statistic, plain in shown:
            key = prefix + plain.replace("_per_device", f"_per_{device}")
            row[key] = _latency(cell, part, name, statistic) if statistic else cell and cell.number(part, name, None)
            if statistic or name in with_interval:
                ends = cell.interval(part, name, statistic) if cell else None
                row[f"{key}_low"], row[f"{key}_high"] = ends or (None, None)
        for name, latency in LATENCIES.items():
            count = _latency(cell, part, name, "count")
            enough = [f"p{q}" for q in latency.percentiles if count is not None and count >= SAMPLES_NEEDED[q]]
            row[f"{prefix}{name}_count"] = count
            row[f"{prefix}{name}_percentiles_supported"] = " ".join(enough)
    return row


def _latency(cell: Cell | None, part: str, name: str, statistic: str) -> float | None:
    figures = cell and cell.parts[part]
    return figures[name].get(statistic) if figures and figures.get(name) else None


def _check_markdown(
    comparison: Comparison, text: str, cells: dict[str, Cell], names: Sequence[str], device: str
) -> None:
    """The table of summary.md: each number with its three digits, its ~ and its ±."""
    lines = [line for line in text.split("\n\n", 3)[2].splitlines() if line.startswith("|")]
    header, _, *rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    device = "GPU" if device == "gpu" else device
    plain = {one.title.format(device=device): name for name, one in NUMBERS.items() if one.title}
    latencies = {latency.title: name for name, latency in LATENCIES.items()}
    found = {f"{row[0]}-{row[1]}": dict(zip(header[3:], row[3:], strict=True)) for row in rows}
    for name in {**dict.fromkeys(names), **found}:
        cell, expected = cells.get(name), dict.fromkeys(("requests",), OTHER)
        for title in header[4:]:
            short, _, statistic = title.partition(" ")
            figure = plain.get(title) or latencies.get(short)
            if figure is not None:
                expected[title] = _shown(cell, figure, statistic or None)
        comparison.tree("summary.md", name, found.get(name, "no row"), expected)


def _shown(cell: Cell | None, name: str, statistic: str | None) -> str:
    if cell is None:
        return "–"
    value = _latency(cell, "figures", name, statistic) if statistic else cell.number("figures", name, None)
    if value is None:
        return "–"
    median_of = NUMBERS[name].median_of if name in NUMBERS else ""
    of, percentile = (median_of, "p50") if median_of else (name, statistic)
    needed = SAMPLES_NEEDED[int(percentile[1:])] if percentile else 0
    unsure = percentile and (_latency(cell, "figures", of, "count") or 0) < needed
    ends = cell.interval("figures", name, statistic)
    margin = "" if ends is None else f" ±{_two_digits((ends[1] - ends[0]) / 2)}"
    return f"{'~' if unsure else ''}{_three_digits(value)}{margin}"


def _three_digits(value: float) -> str:
    if 0 < value < 0.1:
        return f"{value:.3g}"
    decimals = 0 if value == 0 or value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{decimals}f}"


def _two_digits(value: float) -> str:
    if value == 0:
        return "0"
    decimals = 1 - math.floor(math.log10(value))
    return f"{round(value, decimals):,.{decimals if round(value, decimals) < 10 else 0}f}"
