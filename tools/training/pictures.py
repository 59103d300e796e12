"""The training images of ``synthetic:tiny-vl-trained``: coloured shapes and digits, drawn from a description.

A hash of an image's content (its objects and colours) decides its split, and the two splits share no image size. A
held-out score therefore measures contents and sizes that never occurred in training.
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
APART = 0.2  # the minimum distance of the centres of two shapes, as a share of the image's width and height
_JITTER = 14  # the largest change of a colour channel, up or down
_NOISE = 6.0  # the largest standard deviation of the pixel noise
# Sides in pixels: training uses even sides; the held-out split uses odd sides, and larger ones.
_SIDES: MappingProxyType[Split, range] = MappingProxyType({"train": range(48, 130, 2), "held-out": range(41, 242, 2)})
_LARGEST_ASPECT = 1.6


@dataclass(frozen=True, slots=True)
class Figure:
    """A shape or a digit.

    ``x``, ``y``: its centre, as a share of the image's width and height. ``radius``: half of its size, as a share of
    the image's shorter side.
    """

    name: str
    colour: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True, slots=True)
class Scene:
    """The content of an image. ``seed`` determines only jitter and noise."""

    kind: Kind
    width: int
    height: int
    background: str
    figures: tuple[Figure, ...]
    seed: int

    @property
    def key(self) -> str:
        """The content as text, without positions and sizes."""
        named = sorted(f"{figure.colour} {figure.name}" for figure in self.figures)
        return f"{self.kind}: {', '.join(named)} on {self.background}"

    @property
    def split(self) -> Split:
        digest = hashlib.sha256(self.key.encode()).digest()
        return "held-out" if int.from_bytes(digest[:4], "little") % HELD_OUT_SHARE == 0 else "train"


def draw_scene(rng: random.Random, split: Split, kind: Kind, figure: str | None = None) -> Scene:
    """Draws a scene of ``split``. ``figure``: the required shape, for a kind with one shape."""
    while True:
        width, height = _size(rng, split)
        background, *colours = rng.sample(list(COLOURS), 3)
        scene = Scene(
            kind, width, height, background, _figures(rng, kind, colours, width / height, figure), rng.getrandbits(32)
        )
        if scene.split == split:
            return scene


def _size(rng: random.Random, split: Split) -> tuple[int, int]:
    """Draws a size. A third of the images is square, wide and tall each; the longer side is at least 25 % longer."""
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
    """Draws two shapes that differ in both x and y, so that a mirrored image has another answer."""
    names = rng.sample(SHAPES, 2)
    while True:
        radii = [rng.uniform(0.16, 0.19) for _ in names]
        places = [(rng.uniform(0.2, 0.8), rng.uniform(0.2, 0.8)) for _ in names]
        right, down = abs(places[1][0] - places[0][0]), abs(places[1][1] - places[0][1])
        # In units of the shorter side. The corners of squares reach furthest.
        apart = max(right * max(aspect, 1.0), down * max(1 / aspect, 1.0))
        if min(right, down) >= APART and apart > sum(radii):
            return tuple(Figure(n, c, *p, r) for n, c, p, r in zip(names, colours, places, radii, strict=True))


def draw(scene: Scene) -> Image.Image:
    """Renders the scene as an RGB image of the scene's size, determined by the scene and the Pillow release."""
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
