"""Colour and symbol of each topology, which are the same in all charts, tables and cards of the page."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from trtx.report.view import RunView

# Okabe and Ito's colours, which are distinguishable with red-green colour blindness. Both modes have fixed ones.
_OF_MODES = {"agg": ("#0072B2", "circle"), "disagg": ("#D55E00", "diamond")}
_OTHERS = (
    ("#009E73", "square"), ("#CC79A7", "triangle-up"), ("#8A6D00", "triangle-down"), ("#56B4E9", "star"),
    ("#7B4FA3", "pentagon"), ("#5b6b7c", "hexagon"), ("#0072B2", "cross"), ("#D55E00", "hourglass"),
)  # fmt: skip
# Plotly's symbols as polygons centred in a 20 × 20 square, for the legend.
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
    """Colour and symbol of one topology."""

    color: str
    symbol: str  # Plotly's name

    @property
    def outline(self) -> str | None:
        """Points of the symbol in a 20 × 20 square; None for a circle."""
        return _OUTLINES.get(self.symbol)


def marks(view: RunView) -> dict[str, Mark]:
    """Marks by topology, in table order; they repeat after the tenth topology."""
    free = (mark for mode, mark in _OF_MODES.items() if mode not in view.labels)
    others = itertools.cycle((*_OTHERS, *free))
    return {label: Mark(*(_OF_MODES.get(label) or next(others))) for label in view.labels}
