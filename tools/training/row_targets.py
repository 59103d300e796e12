"""Training targets for each row of an image's embedding, in addition to the answers.

Answers alone train a vision tower slowly, because they give one word for a whole image. These targets describe the
content of each row's patch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pictures import COLOURS, SHAPES, Scene

NAMES = ("nothing", *SHAPES, *map(str, range(10)))
SURFACES = ("padding", *COLOURS)
CENTRES = ("none", "one")
_POINTS = 6  # sample points along a patch's side
_REACHES = 0.1  # the share of a patch's points that a shape must cover to be the patch's shape


def target_sizes(side: int) -> tuple[int, ...]:
    """Returns the number of classes of each target of a row."""
    return len(NAMES), len(SURFACES), len(CENTRES), side, side


def row_targets(scene: Scene, side: int) -> list[tuple[int, int, int, int, int]]:
    """Returns the targets of ``side * side`` patches, row by row.

    They are the shape that reaches into the patch (its outline identifies it best), the patch's main colour, whether it
    contains a shape's centre, its column and its row. The image is padded to a square around its middle, as the image
    processor does.
    """
    longest, shorter = max(scene.width, scene.height), min(scene.width, scene.height)
    before = ((longest - scene.width) / 2, (longest - scene.height) / 2)
    names = np.full((side, side), NAMES.index("nothing"))
    centres = np.zeros((side, side), int)
    places = (np.arange(side * _POINTS) + 0.5) / (side * _POINTS) * longest
    x, y = np.meshgrid(places - before[0], places - before[1])  # coordinates of the points, in pixels of the image
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
    """Returns which points lie on a shape as ``draw`` draws it, or within the circle around a digit.

    ``right``, ``down``: the offsets from the centre, in radii.
    """
    if name == "square":
        return np.asarray(np.maximum(abs(right), abs(down)) <= 1)
    if name == "triangle":
        return np.asarray((abs(down) <= 1) & (abs(right) <= (down + 1) / 2))
    return np.asarray(right**2 + down**2 <= 1)


def _share(covered: npt.NDArray[np.bool_], side: int) -> npt.NDArray[np.float64]:
    """Returns the share of each patch's points that are covered."""
    return np.asarray(covered.reshape(side, _POINTS, side, _POINTS).mean(axis=(1, 3)))


def _most(covered: npt.NDArray[np.bool_], side: int) -> npt.NDArray[np.bool_]:
    return np.asarray(_share(covered, side) >= 0.5)
