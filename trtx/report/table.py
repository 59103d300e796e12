"""The terminal table of a run, readable at 80 columns."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from trtx.bench.judge.checks import ValidityLevel
from trtx.bench.metrics import error_request_count, request_count
from trtx.report.columns import UNSURE, Column, needed, table_columns
from trtx.report.comparison import arms_tables
from trtx.report.gpus import gpu_table
from trtx.report.scores import scores_table
from trtx.report.speculation import drafts_table
from trtx.report.validity import MARKS, AtLevel, by_level, doubtful, not_checked_counts, reason_text, reasons
from trtx.report.verdict import verdict_table
from trtx.report.view import Row, RunView
from trtx.report.whole_table import WholeTable

_STYLE = {
    "ok": "",
    "uncounted": "yellow",
    "incomplete": "yellow",
    "errors": "yellow",
    "failed": "red",
    "missing": "dim",
}
_NAMED = 6  # maximum number of cells in a list without problems; longer lists show a count


def console_table(view: RunView) -> RenderableType:
    """One line per cell: requests with failures, throughput, TTFT and ITL in ms; problems are listed below by cell."""
    shown = table_columns(view)
    table = WholeTable(caption=_caption(view))
    table.add_column("topology", max_width=13, overflow="fold")
    table.add_column("load", justify="right", overflow="fold")
    table.add_column("ok", justify="right", no_wrap=True)
    table.add_column("failed", justify="right", no_wrap=True)
    for column in shown:
        table.add_column(column.short, justify="right", no_wrap=True)
    for index, row in enumerate(view.rows):
        if index and view.rows[index - 1].topology != row.topology:
            table.add_section()
        table.add_row(
            row.topology, _load(view, row), *_requests(row), *(_cell(column, row) for column in shown),
            style=_STYLE[row.status],
        )  # fmt: skip
    judged = verdict_table(view.verdict)
    scored = [] if view.scores is None else [scores_table(view.scores.lines)]
    below = [*scored, *([] if judged is None else [judged]), *arms_tables(view)]
    gpus, drafts = gpu_table(view), drafts_table(view)
    return Group(
        table,
        *([Text(), *gpus] if gpus else []),
        *([Text(), *drafts] if drafts else []),
        *_problems(view),
        *_validity(view),
        *(part for one in below for part in (Text(), one)),
    )


def _problems(view: RunView) -> list[RenderableType]:
    """The number of failed requests per cell with each reason and its count, followed by other problems."""
    lines: list[RenderableType] = []
    for row in view.rows:
        if row.failed_text:
            lines.append(Text(f"{row.name}: {row.failed_text}"))
            lines += [Padding(Text(f"{count} × {reason}"), (0, 0, 0, 2)) for reason, count in row.failures]
    for text, rows in view.other_problems:
        if names := [row.name for row in rows if row.cell is not None]:
            lines.append(Text(f"{', '.join(names)}: {text}"))
    return [Text(), *lines] if lines else []


def _validity(view: RunView) -> list[RenderableType]:
    """Each cell's level and reasons, and checks that were not made; the summaries say why not."""
    lines: list[RenderableType] = []
    for row in doubtful(view):
        for reason in reasons(row):
            style = "bold red" if reason.level is ValidityLevel.INVALID else "yellow"
            lines.append(Text.assemble((reason.level.value, style), f" {row.name}: {reason_text(reason)}"))
    lines += [Text(_valid(at, view)) for at in by_level(view) if at.level is ValidityLevel.VALID]
    if counts := not_checked_counts(view):
        lines.append(Text(f"not checked: {', '.join(_in_cells(view, *entry) for entry in counts)}", "dim"))
    return [Text(), *lines] if lines else []


def _valid(at: AtLevel, view: RunView) -> str:
    others = [row for row in view.rows if row.name not in at.cells]
    if not others:
        cells = f"all {len(at.cells)} cells" if len(at.cells) > 1 else at.cells[0]
    elif all(row.level in MARKS for row in others) and len(at.cells) > 1:
        cells = f"the other {len(at.cells)} cells"
    elif len(at.cells) > _NAMED:
        cells = f"{len(at.cells)} of {len(view.rows)} cells"
    else:
        cells = ", ".join(at.cells)
    return f"{at.level.value}: {cells}"


def _in_cells(view: RunView, name: str, count: int) -> str:
    judged = sum(row.validity is not None for row in view.rows)
    return name if count == judged else f"{name} ({count} of {judged} cells)"


def _load(view: RunView, row: Row) -> str:
    """A cell's load, with lengths if they vary, and the mark of a cell that isn't VALID; other cells are padded
    accordingly.
    """
    text = f"{row.load_text} {row.lengths_text}" if view.has_several_lengths else row.load_text
    if not any(one.level in MARKS for one in view.rows):
        return text
    return text + (MARKS.get(row.level, " ") if row.level else " ")


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
            latencies.setdefault(column.metric.title, []).append(f"p{column.percentile}")
    latency_texts = [f"{title} {', '.join(percentiles)}" for title, percentiles in latencies.items()]
    marks = [f"{MARKS[at.level]} {at.level.value}" for at in reversed(by_level(view)) if at.level in MARKS]
    levels = f" {', '.join(marks)}: see below." if marks else ""
    alike = f" Deterministic: {view.deterministic}." if view.deterministic else ""
    return f"{' and '.join(latency_texts)} in ms.{mark}{levels}{alike}"
