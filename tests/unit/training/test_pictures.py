"""Drawn pictures and what is asked about them: the answers are true of the pixels, and false of others."""

from __future__ import annotations

import hashlib
import itertools
import random

import numpy as np
import pytest
from picture_tasks import (
    TASKS,
    conversation,
    held_out,
    questions,
    questions_of_several,
    several,
    turn,
)
from pictures import COLOURS, KINDS, Figure, Kind, Scene, draw, draw_scene
from PIL import ImageOps
from row_targets import CENTRES, NAMES, SURFACES, row_targets

from trtx.checkpoint.tasks import Split

pytestmark = pytest.mark.slow


def scenes(split: Split, count: int, seed: int = 0) -> list[Scene]:
    rng = random.Random(seed)
    return [draw_scene(rng, split, KINDS[index % len(KINDS)]) for index in range(count)]


def nearest_colour(pixel: np.ndarray) -> str:
    return min(COLOURS, key=lambda name: float(np.abs(pixel - np.array(COLOURS[name])).sum()))


def test_a_scene_is_drawn_the_same_every_time() -> None:
    figures = (Figure("circle", "red", 0.3, 0.3, 0.2), Figure("triangle", "blue", 0.7, 0.7, 0.15))
    scene = Scene("two", 61, 43, "white", figures, 5)
    assert draw(scene).tobytes() == draw(scene).tobytes()
    digest = hashlib.sha256(draw(scene).tobytes()).hexdigest()
    again = draw(Scene("two", 61, 43, "white", scene.figures, 6)).tobytes()
    assert hashlib.sha256(again).hexdigest() != digest
    assert scenes("held-out", 8) == scenes("held-out", 8) != scenes("held-out", 8, seed=1)


def test_the_splits_share_no_content_and_no_side() -> None:
    trained, kept = scenes("train", 400), scenes("held-out", 200)
    assert not {scene.key for scene in trained} & {scene.key for scene in kept}
    sides = [{side for scene in of for side in (scene.width, scene.height)} for of in (trained, kept)]
    assert not sides[0] & sides[1]
    assert max(sides[1]) > max(sides[0]) and min(sides[1]) < min(sides[0])
    for of in (trained, kept):
        assert {np.sign(scene.width - scene.height) for scene in of} == {-1, 0, 1}


@pytest.mark.parametrize("kind", ["one", "two"])
def test_a_figure_has_its_colour_at_its_place_on_its_background(kind: Kind) -> None:
    rng = random.Random(3)
    for _ in range(20):
        scene = draw_scene(rng, "train", kind)
        pixels = np.asarray(draw(scene)).astype(int)
        assert pixels.shape == (scene.height, scene.width, 3)
        assert nearest_colour(pixels[0, 0]) == scene.background
        for figure in scene.figures:
            at = pixels[int(figure.y * scene.height), int(figure.x * scene.width)]
            assert nearest_colour(at) == figure.colour


def test_counts_are_of_figures_apart() -> None:
    rng = random.Random(4)
    for _ in range(20):
        scene = draw_scene(rng, "held-out", "count")
        for a, b in itertools.combinations(scene.figures, 2):
            away = max(abs(a.x - b.x) * scene.width, abs(a.y - b.y) * scene.height)
            assert away > (a.radius + b.radius) * min(scene.width, scene.height)
        (asked,) = [question for question in questions(scene) if question.task == "count"]
        assert asked.answer == str(len(scene.figures))


def mirrored(scene: Scene) -> Scene:
    figures = tuple(Figure(f.name, f.colour, 1 - f.x, f.y, f.radius) for f in scene.figures)
    return Scene(scene.kind, scene.width, scene.height, scene.background, figures, scene.seed)


def transposed(scene: Scene) -> Scene:
    figures = tuple(Figure(f.name, f.colour, f.y, f.x, f.radius) for f in scene.figures)
    return Scene(scene.kind, scene.height, scene.width, scene.background, figures, scene.seed)


@pytest.mark.parametrize("kind", ["one", "two"])
def test_a_mirrored_or_transposed_picture_has_other_answers(kind: Kind) -> None:
    for scene in (draw_scene(random.Random(seed), "train", kind) for seed in range(30)):
        answers = {question.text: question.answer for question in questions(scene)}
        for turned in (mirrored(scene), mirrored(transposed(scene))):
            others = {question.text: question.answer for question in questions(turned)}
            assert any(others.get(text) != answer for text, answer in answers.items()), scene


def test_a_mirrored_scene_is_the_mirrored_picture() -> None:
    scene = Scene("one", 80, 60, "white", (Figure("circle", "red", 0.25, 0.5, 0.2),), 0)
    theirs, ours = np.asarray(ImageOps.mirror(draw(scene))).astype(int), np.asarray(draw(mirrored(scene))).astype(int)
    assert (np.abs(theirs - ours).max(axis=2) > 60).mean() < 0.02  # but for noise, and a column at the edge


def test_pictures_of_one_message_have_different_answers() -> None:
    rng = random.Random(0)
    for _ in range(20):
        shown = several(rng, "held-out", rng.choice((2, 3)))
        for task in ("which-colour", "which-digit"):
            answers = [question.answer for question in questions_of_several(shown) if question.task == task]
            assert len(answers) == len(set(answers)) and len(answers) in (0, len(shown))


def test_every_task_is_asked_of_what_was_not_trained_on() -> None:
    for task in TASKS:
        samples = list(held_out(task, 5))
        assert [sample.question.task for sample in samples] == [task] * 5
        assert all(scene.split == "held-out" for sample in samples for scene in sample.scenes)
        assert samples == list(held_out(task, 5)) != list(held_out(task, 5, seed=1))
    rng = random.Random(0)
    assert {question.task for _ in range(60) for question in conversation(rng, "train")[1]} == set(TASKS)


def test_a_turn_is_what_the_chat_template_renders() -> None:
    question = questions(scenes("train", 1)[0])[0]
    prompt, answer = turn(question, 2)
    assert prompt == f"<|im_start|>user\n1<image>2<image>{question.text}<|im_end|>\n<|im_start|>assistant\n"
    assert turn(question, 1, after=True)[0].endswith(f"{question.text}1<image><|im_end|>\n<|im_start|>assistant\n")
    assert turn(question) == (prompt.replace("1<image>2<image>", ""), answer)


def test_rows_are_told_what_covers_them() -> None:
    # Wide: the picture fills the middle half of the square, its circle the left half of that.
    scene = Scene("one", 100, 50, "white", (Figure("circle", "red", 0.25, 0.5, 0.4),), 0)
    targets = row_targets(scene, 5)
    assert [(right, down) for *_, right, down in targets[:7]] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 0),
        (4, 0),
        (0, 1),
        (1, 1),
    ]
    rows = [(NAMES[name], SURFACES[surface], CENTRES[centre]) for name, surface, centre, *_ in targets]
    assert rows[0] == rows[4] == rows[20] == ("nothing", "padding", "none")
    assert rows[2 * 5 + 1] == ("circle", "red", "one")
    corner = 6 * 20 + 1  # of the square around it, which no circle reaches
    for name, told_as in (("circle", "nothing"), ("square", "square")):
        figure = Scene("one", 100, 50, "white", (Figure(name, "red", 0.25, 0.5, 0.4),), 0)
        assert NAMES[row_targets(figure, 20)[corner][0]] == told_as
    triangle = Scene("one", 100, 100, "white", (Figure("triangle", "blue", 0.5, 0.5, 0.5),), 0)
    told = [NAMES[name] for name, *_ in row_targets(triangle, 5)]
    assert told[20:25] == ["triangle"] * 5 and told[:2] == told[3:5] == ["nothing"] * 2
    assert rows[2 * 5 + 4] == ("nothing", "white", "none")
    assert sum(centre == "one" for _, _, centre in rows) == 1
