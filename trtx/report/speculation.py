"""Table of speculation per cell: acceptance by position in the draft, from the workers' counters."""

from __future__ import annotations

from rich.console import RenderableType

from trtx.bench.draft_counters import DraftCounts
from trtx.report.columns import MISSING, number
from trtx.report.tables import heads, markdown_table, terminal_table
from trtx.report.view import RunView

DRAFT_HEADINGS = (
    "cell",
    "drafts",
    "steps with a draft, %",
    "tokens a step",
    "acceptance length",
    "acceptance rate, %",
    "by position, %",
    "draft overhead, %",
)
_TERMINAL_HEADINGS = (
    "\ncell",
    "\ndrafts",
    "% of\nsteps",
    "tokens\na step",
    "accepted\nlength",
    "accepted\n%",
    "\nby position, %",
    "draft\ntime %",
)
DRAFT_MEANING = (
    "From the workers' own counters, or what the server reported with its answers. A draft: a request with drafted "
    "tokens in one step. Steps with a draft: of all decode steps of all requests. Tokens a step: of a request in a "
    "decode step, with a draft or without. Acceptance length: 1 + accepted tokens / drafts. By position: the "
    "acceptance rate of the first drafted token, of the second, and so on, over the drafts that are that long. Draft "
    "overhead: the share of the steps' time that drafting took on the host."
)


def draft_rows(view: RunView) -> tuple[tuple[str, ...], ...]:
    """One row of text per cell; empty for runs in which no topology speculates."""
    cells = [(row.name, row.cell.drafts) for row in view.rows if row.cell]
    if all(counts is None for _, counts in cells):
        return ()
    return tuple((name, *_cells(counts)) for name, counts in cells)


def _cells(counts: DraftCounts | None) -> tuple[str, ...]:
    if counts is None:
        return (MISSING,) * (len(DRAFT_HEADINGS) - 1)
    share = 100 * counts.drafts / counts.decodes if counts.decodes else None
    return (
        f"{counts.drafts:,}",
        _number(share),
        _number(counts.tokens_per_step),
        _number(counts.acceptance_length),
        _number(counts.acceptance_rate),
        ", ".join(map(_number, counts.rates_at)) or MISSING,
        _number(counts.overhead),
    )


def _number(value: float | None) -> str:
    return MISSING if value is None else number(value)


def drafts_table(view: RunView) -> list[RenderableType]:
    """The table for a terminal; empty for runs in which no topology speculates."""
    rows = draft_rows(view)
    return [terminal_table(heads(*_TERMINAL_HEADINGS), rows)] if rows else []


def drafts_markdown(view: RunView) -> list[str]:
    rows = draft_rows(view)
    return ["", "## Speculation", "", DRAFT_MEANING, "", *markdown_table(heads(*DRAFT_HEADINGS), rows)] if rows else []
