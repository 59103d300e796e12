"""Table of GPU use, energy and cost per cell over the steady parts, and why values are not known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from trtx.bench import Metric
from trtx.bench.gpu_metrics import (
    cost_per_million_output_tokens,
    cost_per_million_tokens,
    energy_per_output_token,
    energy_per_token,
    gpu_memory_peak,
    gpu_power,
    gpu_power_peak,
    gpu_utilization,
    gpu_utilization_peak,
)
from trtx.report.columns import Column, shown_metrics
from trtx.report.tables import heads, markdown_line, markdown_table, table_cell, terminal_table
from trtx.report.view import Row, RunView

# Metric -> its heading, in as many lines as the terminal has room for.
_HEADINGS: Mapping[Metric[Any], str] = {
    gpu_utilization: "GPU\nuse %",
    gpu_utilization_peak: "peak\nuse %",
    gpu_power: "\nW",
    gpu_power_peak: "peak\nW",
    gpu_memory_peak: "peak\nGiB",
    energy_per_output_token: "J/out.\ntoken",
    energy_per_token: "J/\ntoken",
    cost_per_million_output_tokens: "cost/M\nout. tokens",
    cost_per_million_tokens: "cost/M\ntokens",
}
_CELL = "\ncell"
GPU_MEANING = (
    "GPUs over the steady part of each trial. W, J and the cost are of all GPUs of the topology. J and the cost are "
    "per output token, or per token of input and output."
)


def _columns(view: RunView) -> tuple[Column, ...]:
    shown = shown_metrics(view)
    return tuple(Column(metric, None, view.device, "steady") for metric in _HEADINGS if metric in shown)


def gpu_reasons(view: RunView) -> tuple[tuple[str, str], ...]:
    """Returns why GPU values are unknown: pairs of cell names and reason.

    Empty for a run on CPUs without a GPU price.
    """
    measured = [row.cell for row in view.rows if row.cell is not None and row.cell.figures is not None]
    is_expected = any(cell.device == "gpu" or cell.gpu_hour_price is not None for cell in measured)
    if not is_expected and not _columns(view):
        return ()
    found: dict[str, list[str]] = {}
    for cell in measured:
        for reason in cell.gpu_reasons:
            found.setdefault(reason, []).append(cell.name)
    return tuple(
        ("all cells" if len(cells) == len(measured) > 1 else ", ".join(cells), reason)
        for reason, cells in found.items()
    )


def gpu_table(view: RunView) -> list[RenderableType]:
    """The table for a terminal with the reasons below; empty for runs without both."""
    columns, parts = _columns(view), list[RenderableType]()
    if columns:
        names = [_HEADINGS[column.metric] for column in columns]
        rows = [[row.name, *(column.text(row) for column in columns)] for row in view.rows]
        parts.append(terminal_table(heads(_CELL, *names, text=(_CELL,)), rows, GPU_MEANING))
    parts += [Text(f"GPUs of {cells}: {reason}", "dim") for cells, reason in gpu_reasons(view)]
    return parts


def gpus_markdown(view: RunView) -> list[str]:
    columns = _columns(view)
    reasons = [f"- {cells}: {markdown_line(reason)}" for cells, reason in gpu_reasons(view)]
    rows = [[row.name, *(_with_margin(column, row) for column in columns)] for row in view.rows]
    names = [table_cell(column.title) for column in columns]
    table = ["", *markdown_table(heads("cell", *names), rows)] if columns else []
    return ["", "## GPUs", "", GPU_MEANING, *table, *(["", *reasons] if reasons else [])] if columns or reasons else []


def _with_margin(column: Column, row: Row) -> str:
    return f"{column.text(row)} {column.margin(row)}".rstrip()
