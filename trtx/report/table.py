"""The table for a terminal, readable at 80 columns."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trtx.bench.metrics import error_request_count, request_count
from trtx.report.columns import UNSURE, Column, needed, table_columns
from trtx.report.verdict import verdict_table
from trtx.report.view import Row, RunView

_STYLE = {"ok": "", "uncounted": "yellow", "errors": "yellow", "failed": "red", "missing": "dim"}


def console_table(view: RunView) -> RenderableType:
    """One line a cell: requests with failures, throughput, TTFT and ITL in ms; under it what went wrong in which."""
    shown = table_columns(view)
    table = Table(
        caption=_caption(view),
        caption_justify="left",
        pad_edge=False,
        box=None,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    table.add_column("topology", max_width=13, overflow="fold")
    table.add_column("load", justify="right", no_wrap=True)
    table.add_column("ok", justify="right", no_wrap=True)
    table.add_column("failed", justify="right", no_wrap=True)
    for column in shown:
        table.add_column(column.short, justify="right", no_wrap=True)
    for index, row in enumerate(view.rows):
        if index and view.rows[index - 1].topology != row.topology:
            table.add_section()
        table.add_row(
            row.topology, row.load.label, *_requests(row), *(_cell(column, row) for column in shown),
            style=_STYLE[row.status],
        )  # fmt: skip
    judged = verdict_table(view.verdict)
    return Group(table, *_problems(view), *([] if judged is None else [Text(), judged]))


def _problems(view: RunView) -> list[RenderableType]:
    """For each cell with failed or uncounted requests, how many; every reason with its count; prompts not as asked."""
    lines: list[RenderableType] = []
    for row in view.rows:
        if row.failed_text:
            lines.append(Text(f"{row.name}: {row.failed_text}"))
            lines += [Padding(Text(f"{count} × {reason}"), (0, 0, 0, 2)) for reason, count in row.failures]
        if row.uncounted_text:
            lines.append(Text(f"{row.name}: {row.uncounted_text}"))
        if row.isl_text:
            lines.append(Text(f"{row.name}: {row.isl_text}"))
    return [Text(), *lines] if lines else []


def _requests(row: Row) -> tuple[Text, Text]:
    if row.figures is None:
        return Text("–"), Text("no result" if row.status == "failed" else "not run", "red")
    failed = row.figures[error_request_count]
    return Text(f"{row.figures[request_count]:,}"), Text(f"{failed:,}", "bold red" if failed else "")


def _cell(column: Column, row: Row) -> Text:
    return Text(column.text(row), "" if column.is_sure(row) else "dim")


def _caption(view: RunView) -> str:
    columns = table_columns(view)
    unsure = any(not column.is_sure(row) for row in view.rows if row.figures for column in columns)
    samples = ", ".join(str(count) for count in needed(columns).values())
    mark = f" {UNSURE} fewer samples than it needs ({samples})." if unsure else ""
    latencies: dict[str, list[str]] = {}
    for column in columns:
        if column.percentile:
            latencies.setdefault(column.figure.title, []).append(f"p{column.percentile}")
    told = [f"{title} {', '.join(percentiles)}" for title, percentiles in latencies.items()]
    return f"{' and '.join(told)} in ms.{mark}"
