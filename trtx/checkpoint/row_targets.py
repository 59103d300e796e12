"""What each row of a drawn picture's embedding should say: targets beside the answers, for the training alone.

Answers alone teach a tower slowly: one word for a whole picture. A row is told what covers its patch.
"""

from __future__ import annotations

from math import hypot

from trtx.checkpoint.pictures import COLOURS, SHAPES, Scene

NAMES = ("nothing", *SHAPES, *map(str, range(10)))
SURFACES = ("padding", *COLOURS)
CENTRES = ("none", "one")


def target_sizes(side: int) -> tuple[int, ...]:
    """Of the classifications of a row."""
    return len(NAMES), len(SURFACES), len(CENTRES), side, side


def row_targets(scene: Scene, side: int) -> list[tuple[int, int, int, int, int]]:
    """Of ``side * side`` patches, row by row: the figure that covers it, the colour there, whether a figure's centre is
    in it, how far to the right and down it is. A picture is padded to a square around its middle, as its image
    processor does."""
    longest = max(scene.width, scene.height)
    before = ((longest - scene.width) / 2, (longest - scene.height) / 2)
    figures = [
        (
            (before[0] + figure.x * scene.width) / longest,
            (before[1] + figure.y * scene.height) / longest,
            figure.radius * min(scene.width, scene.height) / longest,
            figure,
        )
        for figure in scene.figures
    ]
    found = []
    for index in range(side * side):
        x, y = (index % side + 0.5) / side, (index // side + 0.5) / side
        name, surface, centre = "nothing", _ground(scene, x * longest - before[0], y * longest - before[1]), 0
        for at_x, at_y, radius, figure in figures:
            if hypot(x - at_x, y - at_y) <= radius + 0.25 / side:
                name, surface = figure.name, figure.colour
            if int(at_x * side) == index % side and int(at_y * side) == index // side:
                name, surface, centre = figure.name, figure.colour, 1
        found.append((NAMES.index(name), SURFACES.index(surface), centre, index % side, index // side))
    return found


def _ground(scene: Scene, x: float, y: float) -> str:
    is_inside = 0 <= x < scene.width and 0 <= y < scene.height
    return scene.background if is_inside else "padding"
