"""How topologies are told apart on the page: a color and a symbol for each, the same in every chart, table and card."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from trtx.report.view import RunView

# Okabe and Ito's colours, told apart by people who see red and green alike. The two modes always have theirs.
_OF_MODES = {"agg": ("#0072B2", "circle"), "disagg": ("#D55E00", "diamond")}
_OTHERS = (
    ("#009E73", "square"), ("#CC79A7", "triangle-up"), ("#8A6D00", "triangle-down"), ("#56B4E9", "star"),
    ("#7B4FA3", "pentagon"), ("#5b6b7c", "hexagon"), ("#0072B2", "cross"), ("#D55E00", "hourglass"),
)  # fmt: skip
# Plotly's symbols as polygons around the middle of a square of 20, for the legend.
_OUTLINES = {
    "diamond": "10,1 19,10 10,19 1,10",
    "square": "3,3 17,3 17,17 3,17",
    "triangle-up": "10,2 19,17 1,17",
    "triangle-down": "10,18 19,3 1,3",
    "star": "10,0 12.5,7 20,7 14,11.5 16,19 10,14.5 4,19 6,11.5 0,7 7.5,7",
    "pentagon": "10,1 19,8 15.5,18 4.5,18 1,8",
    "hexagon": "10,1 18,5.5 18,14.5 10,19 2,14.5 2,5.5",
    "cross": "7,1 13,1 13,7 19,7 19,13 13,13 13,19 7,19 7,13 1,13 1,7 7,7",
    "hourglass": "2,2 18,2 2,18 18,18",
}


@dataclass(frozen=True, slots=True)
class Mark:
    """Of one topology."""

    color: str
    symbol: str  # Plotly's name

    @property
    def outline(self) -> str | None:
        """Points of the symbol in a square of 20; None for a circle."""
        return _OUTLINES.get(self.symbol)


def marks(view: RunView) -> dict[str, Mark]:
    """By topology, in the order of the table; past the tenth they come again."""
    free = (mark for mode, mark in _OF_MODES.items() if mode not in view.labels)
    others = itertools.cycle((*_OTHERS, *free))
    return {label: Mark(*(_OF_MODES.get(label) or next(others))) for label in view.labels}
