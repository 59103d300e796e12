"""Pictures that ``synthetic:tiny-vl-trained`` learns from: coloured shapes and digits, drawn from a description.

A picture's content (what is on it, in which colours) decides its split by a hash, and the sizes of the two splits have
none in common: so a held-out score is of contents that no training picture had, at sizes that none had.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from trtx.checkpoint.tasks import HELD_OUT_SHARE, Split

if TYPE_CHECKING:
    from PIL import Image

Kind = Literal["one", "two", "count", "digit"]
KINDS: tuple[Kind, ...] = ("one", "two", "count", "digit")
SHAPES = ("circle", "square", "triangle")
COLOURS: MappingProxyType[str, tuple[int, int, int]] = MappingProxyType(
    {
        "red": (220, 40, 40),
        "green": (40, 165, 60),
        "blue": (40, 80, 225),
        "yellow": (240, 220, 50),
        "purple": (145, 50, 185),
        "orange": (245, 140, 30),
        "white": (243, 243, 243),
        "black": (18, 18, 18),
    }
)
LARGEST_COUNT = 5
APART = 0.2  # of the picture's width and height, at least, between the centres of two shapes
_JITTER = 14  # of a colour's channels, up or down
_NOISE = 6.0  # at most, the standard deviation of each pixel
# Sides in pixels: even ones are trained on, odd ones (and larger) held out.
_SIDES: MappingProxyType[Split, range] = MappingProxyType({"train": range(48, 130, 2), "held-out": range(41, 242, 2)})
_LARGEST_ASPECT = 1.6


@dataclass(frozen=True, slots=True)
class Figure:
    """A shape or a digit. ``x``, ``y``: of its centre, in widths and heights of the picture; ``radius``: half of its
    size, in shorter sides."""

    name: str
    colour: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True, slots=True)
class Scene:
    """What is on a picture. ``seed`` decides jitter and noise alone."""

    kind: Kind
    width: int
    height: int
    background: str
    figures: tuple[Figure, ...]
    seed: int

    @property
    def key(self) -> str:
        """Its content, places and sizes left out."""
        named = sorted(f"{figure.colour} {figure.name}" for figure in self.figures)
        return f"{self.kind}: {', '.join(named)} on {self.background}"

    @property
    def split(self) -> Split:
        digest = hashlib.sha256(self.key.encode()).digest()
        return "held-out" if int.from_bytes(digest[:4], "little") % HELD_OUT_SHARE == 0 else "train"


def draw_scene(rng: random.Random, split: Split, kind: Kind, figure: str | None = None) -> Scene:
    """One of ``split``. ``figure``: the shape that has to be on it, of a kind with one figure."""
    while True:
        width, height = _size(rng, split)
        background, *colours = rng.sample(list(COLOURS), 3)
        scene = Scene(
            kind, width, height, background, _figures(rng, kind, colours, width / height, figure), rng.getrandbits(32)
        )
        if scene.split == split:
            return scene


def _size(rng: random.Random, split: Split) -> tuple[int, int]:
    """A third of the pictures each square, wide and tall; the latter by a quarter at least."""
    shape, side = rng.choice(("square", "wide", "tall")), rng.choice(_SIDES[split])
    if shape == "square":
        return side, side
    sides = _SIDES[split]
    others = [other for other in sides if 1.25 <= max(other, side) / min(other, side) <= _LARGEST_ASPECT]
    other = rng.choice(others)
    longer, shorter = max(side, other), min(side, other)
    return (longer, shorter) if shape == "wide" else (shorter, longer)


def _figures(
    rng: random.Random, kind: Kind, colours: list[str], aspect: float, wanted: str | None
) -> tuple[Figure, ...]:
    if kind == "digit":
        place = (0.5 + rng.uniform(-0.1, 0.1), 0.5 + rng.uniform(-0.1, 0.1))
        return (Figure(wanted or str(rng.randrange(10)), colours[0], *place, rng.uniform(0.28, 0.4)),)
    if kind == "one":
        place = (
            rng.choice((0.27, 0.73)) + rng.uniform(-0.07, 0.07),
            rng.choice((0.27, 0.73)) + rng.uniform(-0.07, 0.07),
        )
        return (Figure(wanted or rng.choice(SHAPES), colours[0], *place, rng.uniform(0.18, 0.22)),)
    if kind == "two":
        return _two(rng, colours, aspect)
    count, shape, radius = rng.randint(1, LARGEST_COUNT), wanted or rng.choice(SHAPES), rng.uniform(0.08, 0.13)
    cells = rng.sample([(x, y) for x in range(3) for y in range(3)], count)
    return tuple(
        Figure(
            shape,
            colours[0],
            (2 * x + 1) / 6 + rng.uniform(-0.03, 0.03),
            (2 * y + 1) / 6 + rng.uniform(-0.03, 0.03),
            radius,
        )
        for x, y in cells
    )


def _two(rng: random.Random, colours: list[str], aspect: float) -> tuple[Figure, ...]:
    """Two shapes, to one side and above or below of each other: a mirrored picture has another answer."""
    names = rng.sample(SHAPES, 2)
    while True:
        radii = [rng.uniform(0.16, 0.19) for _ in names]
        places = [(rng.uniform(0.2, 0.8), rng.uniform(0.2, 0.8)) for _ in names]
        right, down = abs(places[1][0] - places[0][0]), abs(places[1][1] - places[0][1])
        # In shorter sides; of squares the corners reach furthest.
        apart = max(right * max(aspect, 1.0), down * max(1 / aspect, 1.0))
        if min(right, down) >= APART and apart > sum(radii):
            return tuple(Figure(n, c, *p, r) for n, c, p, r in zip(names, colours, places, radii, strict=True))


def draw(scene: Scene) -> Image.Image:
    """The picture, RGB, of the scene's own size: the same for the same scene and Pillow release."""
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    rng = random.Random(scene.seed)
    picture = Image.new("RGB", (scene.width, scene.height), _shade(rng, scene.background))
    pen, shorter = ImageDraw.Draw(picture), min(scene.width, scene.height)
    for figure in scene.figures:
        x, y, r = figure.x * scene.width, figure.y * scene.height, figure.radius * shorter
        fill = _shade(rng, figure.colour)
        if figure.name == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=fill)
        elif figure.name == "square":
            pen.rectangle((x - r, y - r, x + r, y + r), fill=fill)
        elif figure.name == "triangle":
            pen.polygon(((x, y - r), (x - r, y + r), (x + r, y + r)), fill=fill)
        else:
            font = ImageFont.load_default(size=2.6 * r)
            pen.text((x, y), figure.name, fill=fill, font=font, anchor="mm")
    noise = rng.uniform(0.0, _NOISE)
    grain = np.random.default_rng(scene.seed).normal(0.0, noise, (scene.height, scene.width, 3))
    return Image.fromarray((np.asarray(picture) + grain).clip(0, 255).astype(np.uint8))


def _shade(rng: random.Random, colour: str) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, value + rng.randint(-_JITTER, _JITTER))) for value in COLOURS[colour])
    return red, green, blue
