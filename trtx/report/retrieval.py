"""Renders the results of ``needle`` over context length and depth: a heat map for the page, tables for other
formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trtx.evals import Retrieval, TopologyScores
from trtx.evals.needle import ANSWER_TOKENS
from trtx.report.charts import Chart, axes_layout
from trtx.report.verdict import MISSING
from trtx.stats.intervals import Interval

# Light to dark, so that they are distinguishable without red and green.
_COLORS = [[0, "#fbeeec"], [0.5, "#c9dcf0"], [1, "#1f5fa8"]]
_ROW_PX, _ABOVE_AND_BELOW_PX = 44, 76
_COLUMN_PX, _BESIDE_PX = 76, 170  # width of an interval's text; a narrow page scrolls horizontally


@dataclass(frozen=True, slots=True)
class RetrievalGrid:
    """The results of one task on one topology."""

    topology: str
    task: str
    found: tuple[Retrieval, ...]

    @property
    def name(self) -> str:
        """HTML id of the chart."""
        return f"retrieval-{self.topology}-{self.task}"

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(one.length for one in self.found))

    @property
    def depths(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(one.depth for one in self.found))

    def at(self, length: int, depth: int) -> Retrieval:
        return next(one for one in self.found if (one.length, one.depth) == (length, depth))

    @property
    def caption(self) -> str:
        """A description of the numbers."""
        samples, shortfall = {one.samples for one in self.found}, max(_shortfalls(self.found), default=0)
        of = f"{min(samples)}" if len(samples) == 1 else f"{min(samples)} to {max(samples)}"
        return (
            f"share retrieved, {of} samples each; a length is a prompt and {ANSWER_TOKENS} tokens for its answer, met "
            f"to within {shortfall} tokens"
        )

    @property
    def heads(self) -> tuple[str, ...]:
        """Column headings of a table."""
        return ("tokens", *(f"depth {depth} %" for depth in self.depths))

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """Rows of a table: a length, then the share at each depth with its interval."""
        return tuple(
            (f"{length:,}", *(share_text(self.at(length, depth)) for depth in self.depths)) for length in self.lengths
        )

    @property
    def height_px(self) -> int:
        return _ABOVE_AND_BELOW_PX + _ROW_PX * max(2, len(self.depths))

    @property
    def least_width_px(self) -> int:
        return _BESIDE_PX + _COLUMN_PX * len(self.lengths)


def grids(scored: tuple[TopologyScores, ...]) -> tuple[RetrievalGrid, ...]:
    return tuple(
        RetrievalGrid(one.topology, task.task, task.retrievals)
        for one in scored
        for task in one.tasks
        if task.retrievals
    )


def share_text(one: Retrieval) -> str:
    """Text such as ``0.90 (0.60–0.98)``, or a dash if no sample has an answer."""
    return MISSING if one.retrieved is None else f"{one.retrieved.estimate:.2f} {_ends(one.retrieved)}"


def heat_map(grid: RetrievalGrid) -> Chart:
    """A heat map: lengths from left to right, depths from top to bottom. Fields without answers have a dash and no
    colour.
    """
    layout = axes_layout("tokens of prompt and answer", "depth of the needle, %")
    lengths, depths = [f"{length:,}" for length in grid.lengths], [str(depth) for depth in grid.depths]
    layout["xaxis"] |= {"type": "category", "showgrid": False}
    layout["yaxis"] |= {"type": "category", "showgrid": False, "autorange": "reversed"}
    rows = [[grid.at(length, depth) for length in grid.lengths] for depth in grid.depths]
    return {
        "data": [
            {
                "type": "heatmap", "x": lengths, "y": depths, "zmin": 0, "zmax": 1, "xgap": 2, "ygap": 2,
                "z": [[None if one.retrieved is None else one.retrieved.estimate for one in row] for row in rows],
                "text": [[share_text(one).replace(" ", "<br>", 1) for one in row] for row in rows],
                "customdata": [[_hover(one) for one in row] for row in rows],
                "texttemplate": "%{text}", "textfont": {"size": 11}, "hoverongaps": False,
                "hovertemplate": "%{customdata}<extra></extra>", "colorscale": _COLORS,
                "colorbar": {"title": {"text": "retrieved"}, "thickness": 12, "tickvals": [0, 0.5, 1]},
            }
        ],
        "layout": layout,
    }  # fmt: skip


def _hover(one: Retrieval) -> str:
    lacking = "" if one.answered == one.samples else f", {one.samples - one.answered} without an answer"
    asked = "" if one.least_tokens is None else f"<br>prompts of {one.least_tokens:,} to {one.most_tokens:,} tokens"
    return f"{one.length:,} tokens, depth {one.depth} %<br>{share_text(one)} of {one.answered}{lacking}{asked}"


def _shortfalls(found: tuple[Retrieval, ...]) -> Iterator[int]:
    for one in found:
        if one.least_tokens is not None:
            yield one.length - ANSWER_TOKENS - one.least_tokens


def _ends(interval: Interval) -> str:
    return f"({interval.low:.2f}–{interval.high:.2f})"
