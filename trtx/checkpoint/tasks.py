"""The generated tasks that ``synthetic:tiny-trained`` learns, with a held-out split that is never trained on.

A hash of a sample's content decides its split, not chance. ``7 + 12`` and ``12 + 7`` are in the same split in every
wording, so held-out accuracy measures learning, not memorization.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from trtx.checkpoint.text import NOUNS
from trtx.checkpoint.tokenizer import END_OF_TEXT, IM_END, IM_START

Split = Literal["train", "held-out"]
HELD_OUT_SHARE = 10  # one content in ten

COLOURS = ("red", "green", "blue", "yellow", "white", "black", "brown", "grey", "golden", "dark", "bright", "light")


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """A question and its only right answer, as text. ``key``: the content that decides the split."""

    task: str
    prompt: str
    answer: str
    key: str

    @property
    def split(self) -> Split:
        digest = hashlib.sha256(f"{self.task}/{self.key}".encode()).digest()
        return "held-out" if int.from_bytes(digest[:4], "little") % HELD_OUT_SHARE == 0 else "train"

    def plain(self) -> tuple[str, str]:
        """Returns prompt and completion without a chat template; the completion ends with the end-of-text token."""
        return self.prompt, f" {self.answer}{END_OF_TEXT}"

    def chat(self) -> tuple[str, str]:
        """Returns prompt and completion as the chat template renders one user message."""
        return (
            f"{IM_START}user\n{self.prompt}{IM_END}\n{IM_START}assistant\n",
            f"{self.answer}{IM_END}",
        )


def _addition_1(rng: random.Random) -> TrainingSample:
    return _sum(rng, "addition-1", 9)


def _addition_2(rng: random.Random) -> TrainingSample:
    return _sum(rng, "addition-2", 99)


def _sum(rng: random.Random, task: str, largest: int) -> TrainingSample:
    a, b = rng.randint(largest // 10, largest), rng.randint(largest // 10, largest)
    prompt = rng.choice((f"{a} + {b} =", f"What is {a} + {b}?"))
    return TrainingSample(task, prompt, str(a + b), f"{min(a, b)}+{max(a, b)}")


def _subtraction(rng: random.Random) -> TrainingSample:
    b, a = sorted((rng.randint(0, 99), rng.randint(0, 99)))
    return TrainingSample("subtraction", rng.choice((f"{a} - {b} =", f"What is {a} - {b}?")), str(a - b), f"{a}-{b}")


def _copying(rng: random.Random) -> TrainingSample:
    words = " ".join(rng.choice(NOUNS) for _ in range(rng.randint(2, 12)))
    return TrainingSample("copying", rng.choice((f"copy: {words} ->", f"Repeat these words: {words}.")), words, words)


def _look_up(rng: random.Random) -> TrainingSample:
    names = rng.sample(NOUNS, rng.randint(2, 10))
    values = [str(rng.randint(0, 99)) if rng.random() < 0.5 else rng.choice(COLOURS) for _ in names]
    table = ", ".join(f"{name} is {value}" for name, value in zip(names, values, strict=True))
    index = rng.randrange(len(names))
    prompt = rng.choice((f"{table}. {names[index]} ->", f"{table}. What is {names[index]}?"))
    return TrainingSample("look-up", prompt, values[index], table)


def _json(rng: random.Random) -> TrainingSample:
    name, count, colour = rng.choice(NOUNS), rng.randint(0, 99), rng.choice(COLOURS)
    fields: dict[str, str | int] = {"name": name, "count": count, "color": colour}
    keys = rng.sample(sorted(fields), rng.randint(2, 3))
    described = ", ".join(f"{key} {fields[key]}" for key in keys)
    answer = json.dumps({key: fields[key] for key in keys})
    return TrainingSample(
        "json", rng.choice((f"json: {described} ->", f"Write JSON with {described}.")), answer, described
    )


TASKS: MappingProxyType[str, Callable[[random.Random], TrainingSample]] = MappingProxyType(
    {
        "addition-1": _addition_1,
        "addition-2": _addition_2,
        "subtraction": _subtraction,
        "copying": _copying,
        "look-up": _look_up,
        "json": _json,
    }
)


def samples(task: str, split: Split, seed: int) -> Iterator[TrainingSample]:
    """Yields samples of one task and split without end, determined by the seed."""
    rng, make = random.Random(f"{seed}/{task}/{split}"), TASKS[task]
    while True:
        sample = make(rng)
        if sample.split == split:
            yield sample
