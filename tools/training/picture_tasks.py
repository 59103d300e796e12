"""Questions about generated images. Each has exactly one right answer, which depends on the image."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pictures import COLOURS, KINDS, SHAPES, Kind, Scene, draw_scene

from trtx.checkpoint.tasks import Split
from trtx.checkpoint.tokenizer import IM_END, IM_START

TASKS = ("colour", "background", "shape", "place", "side", "count", "digit", "format", "which-colour", "which-digit")
_ORDINALS = ("first", "second", "third")
_WEIGHTS: dict[Kind, float] = {"one": 3.0, "two": 3.0, "count": 3.0, "digit": 2.0}
_SEVERAL = 0.35  # the share of training conversations about several images


@dataclass(frozen=True, slots=True)
class Question:
    task: str
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class PictureSample:
    """One question about one or more images."""

    scenes: tuple[Scene, ...]
    question: Question


def questions(scene: Scene, where: str = "") -> list[Question]:
    """Returns all questions about an image. ``where``: such as " in the first picture" if there are several."""
    first = scene.figures[0]
    found = [Question("background", f"Which colour is the background{where}?", scene.background)]
    for figure in scene.figures if scene.kind == "two" else (first,):
        named = "digit" if scene.kind == "digit" else figure.name
        verb = "are" if len(scene.figures) > 1 and scene.kind == "count" else "is"
        plural = "s" if verb == "are" else ""
        found.append(Question("colour", f"Which colour {verb} the {named}{plural}{where}?", figure.colour))
    if scene.kind == "one":
        place = f"{'top' if first.y < 0.5 else 'bottom'} {'left' if first.x < 0.5 else 'right'}"
        found.append(Question("shape", f"Which shape is it{where}?", first.name))
        found.append(Question("place", f"Where is the {first.name}{where}?", place))
    elif scene.kind == "two":
        found += _sides(scene, where)
    elif scene.kind == "count":
        found.append(Question("count", f"How many {first.name}s are there{where}?", str(len(scene.figures))))
    else:
        found.append(Question("digit", f"Which digit is it{where}?", first.name))
    shape = "square" if scene.width == scene.height else "wide" if scene.width > scene.height else "tall"
    if not where:
        found.append(Question("format", "Is the picture wide, tall or square?", shape))
    return found


def _sides(scene: Scene, where: str) -> list[Question]:
    found = []
    for a, b in (scene.figures, scene.figures[::-1]):
        beside = f"Is the {a.name} left or right of the {b.name}{where}?"
        over = f"Is the {a.name} above or below the {b.name}{where}?"
        found.append(Question("side", beside, "left" if a.x < b.x else "right"))
        found.append(Question("side", over, "above" if a.y < b.y else "below"))
    return found


def several(rng: random.Random, split: Split, count: int) -> tuple[Scene, ...]:
    """Draws ``count`` images of one kind in different colours, so that a mix-up of images gives a wrong answer.

    The images show one shape, the same in all of them, or different digits.
    """
    while True:
        if rng.random() < 0.5:
            shape = rng.choice(SHAPES)
            scenes = tuple(draw_scene(rng, split, "one", shape) for _ in range(count))
        else:
            scenes = tuple(draw_scene(rng, split, "digit") for _ in range(count))
        names = [scene.figures[0].name for scene in scenes]
        colours = [scene.figures[0].colour for scene in scenes]
        if len(set(colours)) == count and (scenes[0].kind == "one" or len(set(names)) == count):
            return scenes


def questions_of_several(scenes: Sequence[Scene]) -> list[Question]:
    """Returns for each image the question about its colour and, if it shows a digit, about the digit."""
    found = []
    for ordinal, scene in zip(_ORDINALS, scenes, strict=False):
        for question in questions(scene, f" in the {ordinal} picture"):
            if question.task in ("colour", "digit"):
                found.append(Question(f"which-{question.task}", question.text, question.answer))
    return found


def conversation(rng: random.Random, split: Split) -> tuple[tuple[Scene, ...], list[Question]]:
    """Returns images and the questions about them in random order, for training."""
    if rng.random() < _SEVERAL:
        scenes = several(rng, split, rng.choice((2, 2, 3)))
        asked = questions_of_several(scenes)
    else:
        kind = rng.choices(KINDS, [_WEIGHTS[kind] for kind in KINDS])[0]
        scenes = (draw_scene(rng, split, kind),)
        asked = questions(scenes[0])
    rng.shuffle(asked)
    return scenes, asked


def held_out(task: str, count: int, seed: int = 0) -> Iterator[PictureSample]:
    """Yields ``count`` questions of one task about held-out images, determined by the seed."""
    rng = random.Random(f"{seed}/{task}/held-out")
    while count:
        if task.startswith("which-"):
            scenes = several(rng, "held-out", rng.choice((2, 3)))
            found = questions_of_several(scenes)
        else:
            scenes = (draw_scene(rng, "held-out", rng.choice(KINDS)),)
            found = questions(scenes[0])
        if fitting := [question for question in found if question.task == task]:
            count -= 1
            yield PictureSample(scenes, rng.choice(fitting))


def turn(question: Question, pictures: int = 0, *, after: bool = False) -> tuple[str, str]:
    """Returns prompt and completion as the chat template renders them.

    ``pictures``: the number of images before the text of the question, or after it if ``after``; 0 for later turns.
    """
    shown = "".join(f"{number}<image>" for number in range(1, pictures + 1))
    said = question.text + shown if after else shown + question.text
    return f"{IM_START}user\n{said}{IM_END}\n{IM_START}assistant\n", f"{question.answer}{IM_END}"


def corpus() -> Iterator[str]:
    """Yields training text for the tokenizer, so that each word of questions and answers becomes one or two tokens."""
    rng = random.Random(0)
    for _ in range(3000):
        _, asked = conversation(rng, "train")
        yield from (f"user\n{question.text}\nassistant\n{question.answer}\n" for question in asked)
    for word in (*COLOURS, *SHAPES, "left", "right", "top", "bottom", "above", "below", "wide", "tall"):
        yield from (word, f" {word}") * 50
