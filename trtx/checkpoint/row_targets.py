"""What each row of a drawn picture's embedding should say: targets beside the answers, for the training alone.

Answers alone teach a tower slowly: one word for a whole picture. A row is told what covers its patch.
"""

from __future__ import annotations

import numpy as np  # noqa: TID253  for the training alone
import numpy.typing as npt  # noqa: TID253

from trtx.checkpoint.pictures import COLOURS, SHAPES, Scene

NAMES = ("nothing", *SHAPES, *map(str, range(10)))
SURFACES = ("padding", *COLOURS)
CENTRES = ("none", "one")
_POINTS = 6  # of a patch's side, that are looked at
_REACHES = 0.1  # of them, for a figure to be the patch's


def target_sizes(side: int) -> tuple[int, ...]:
    """Of the classifications of a row."""
    return len(NAMES), len(SURFACES), len(CENTRES), side, side


def row_targets(scene: Scene, side: int) -> list[tuple[int, int, int, int, int]]:
    """Of ``side * side`` patches, row by row: the figure that reaches into it, which its outline tells best; the colour
    of most of it, whether a figure's centre is in it, how far to the right and down it is. A picture is padded to a
    square around its middle, as its image processor does."""
    longest, shorter = max(scene.width, scene.height), min(scene.width, scene.height)
    before = ((longest - scene.width) / 2, (longest - scene.height) / 2)
    names = np.full((side, side), NAMES.index("nothing"))
    centres = np.zeros((side, side), int)
    places = (np.arange(side * _POINTS) + 0.5) / (side * _POINTS) * longest
    x, y = np.meshgrid(places - before[0], places - before[1])  # of points, in pixels of the picture
    is_inside = (x >= 0) & (x < scene.width) & (y >= 0) & (y < scene.height)
    surfaces = _most(is_inside, side)
    surfaces = np.where(surfaces, SURFACES.index(scene.background), SURFACES.index("padding"))
    for figure in scene.figures:
        at_x, at_y, radius = figure.x * scene.width, figure.y * scene.height, figure.radius * shorter
        covered = _covered(figure.name, (x - at_x) / radius, (y - at_y) / radius) & is_inside
        names[_share(covered, side) >= _REACHES] = NAMES.index(figure.name)
        surfaces[_most(covered, side)] = SURFACES.index(figure.colour)
        column, row = (int((at + edge) / longest * side) for at, edge in ((at_x, before[0]), (at_y, before[1])))
        names[row, column], surfaces[row, column] = NAMES.index(figure.name), SURFACES.index(figure.colour)
        centres[row, column] = 1
    columns, rows = np.meshgrid(np.arange(side), np.arange(side))
    found = np.stack([names, surfaces, centres, columns, rows], axis=-1).reshape(-1, 5)
    return [(name, surface, centre, column, row) for name, surface, centre, column, row in found.tolist()]


def _covered(name: str, right: npt.NDArray[np.float64], down: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which points, in radii from its centre, are on a figure as ``draw`` draws it; of a digit, around it."""
    if name == "square":
        return np.asarray(np.maximum(abs(right), abs(down)) <= 1)
    if name == "triangle":
        return np.asarray((abs(down) <= 1) & (abs(right) <= (down + 1) / 2))
    return np.asarray(right**2 + down**2 <= 1)


def _share(covered: npt.NDArray[np.bool_], side: int) -> npt.NDArray[np.float64]:
    """Of each patch's points."""
    return np.asarray(covered.reshape(side, _POINTS, side, _POINTS).mean(axis=(1, 3)))


def _most(covered: npt.NDArray[np.bool_], side: int) -> npt.NDArray[np.bool_]:
    return np.asarray(_share(covered, side) >= 0.5)
