"""Places the labels of a chart's points so that none overlaps another or a point; labels without room are omitted.

Placement uses the smallest chart that the page draws (on a phone). Labels that don't overlap there don't overlap on a
wider chart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_WIDTH_PX, _HEIGHT_PX = 250, 200  # size of the plot area
_CHARACTER_PX, _LINE_PX, _POINT_PX, _GAP_PX = 7.0, 15.0, 11.0, 7.0
# In order of preference: the area above and to the right of a front's point is free, and corners avoid its error bars.
_SIDES = ("top right", "bottom left", "top left", "bottom right", "middle right", "middle left")
_MARGIN_PX = 20  # free space to the right of the area
Line = Sequence[tuple[float, float]]  # points as shares of the axes
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True, slots=True)
class Point:
    """A point with its label, x and y as shares of the axes, from 0 to 1."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class PlacedLabel:
    text: str  # "": no room
    side: str  # Plotly's name of the position


def place(points: Sequence[Point], lines: Sequence[Line] = ()) -> list[PlacedLabel]:
    """For each point the first side with room, if possible also clear of ``lines``; in the order of the points."""
    taken = [point_box(point) for point in points]
    crossed = [box for line in lines for start, end in pairwise(line) for box in _along(start, end)]
    placed = []
    for point in points:
        boxes = {side: label_box(point, side) for side in _SIDES}
        free = [
            side for side, box in boxes.items() if _is_inside(box) and not any(_overlap(box, other) for other in taken)
        ]
        if not free:
            placed.append(PlacedLabel("", _SIDES[0]))
            continue
        clear = (side for side in free if not any(_overlap(boxes[side], other) for other in crossed))
        side = next(clear, free[0])
        taken.append(boxes[side])
        placed.append(PlacedLabel(point.text, side))
    return placed


def _along(start: tuple[float, float], end: tuple[float, float]) -> list[Box]:
    """A line segment as a series of zero-size boxes whose distance is less than a label's height."""
    steps = 30
    found = []
    for step in range(steps + 1):
        x = (start[0] + (end[0] - start[0]) * step / steps) * _WIDTH_PX
        y = (1 - start[1] - (end[1] - start[1]) * step / steps) * _HEIGHT_PX
        found.append((x, y, x, y))
    return found


def point_box(point: Point) -> Box:
    x, y, half = point.x * _WIDTH_PX, (1 - point.y) * _HEIGHT_PX, _POINT_PX / 2
    return (x - half, y - half, x + half, y + half)


def label_box(point: Point, side: str) -> Box:
    left, top, right, bottom = point_box(point)
    width, middle = len(point.text) * _CHARACTER_PX, (top + bottom) / 2
    across = (right, right + _GAP_PX + width) if side.endswith("right") else (left - _GAP_PX - width, left)
    upright = {
        "top": (top - _LINE_PX, top),
        "middle": (middle - _LINE_PX / 2, middle + _LINE_PX / 2),
        "bottom": (bottom, bottom + _LINE_PX),
    }[side.partition(" ")[0]]
    return (across[0], upright[0], across[1], upright[1])


def _is_inside(box: Box) -> bool:
    return box[0] >= 0 and box[1] >= 0 and box[2] <= _WIDTH_PX + _MARGIN_PX and box[3] <= _HEIGHT_PX


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
