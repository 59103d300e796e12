"""The held-out split of the generated tasks and texts: samples that the shipped models were never trained on."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from trtx.checkpoint.tasks import TASKS, TrainingSample, samples
from trtx.checkpoint.text import sentences

HELD_OUT_SEED = 1_000_003  # text has no split by content; training never uses this seed
SENTENCES_PER_TEXT, TEXT_PROMPT_TOKENS = 4, 24


def held_out_samples(task: str, count: int, seed: int = 0) -> list[TrainingSample]:
    """Returns ``count`` held-out samples, determined by the seed."""
    return list(itertools.islice(samples(task, "held-out", seed), count))


def held_out_texts(count: int) -> list[str]:
    """Returns ``count`` short texts like the training text that the model was not trained on."""
    return list(sentences(HELD_OUT_SEED, count))


def held_out_prompts(encode: Callable[[str], list[int]], count: int) -> list[list[int]]:
    """Returns the token ids of about ``count`` prompts: half are tasks, equally many of each; half are text beginnings.

    Answers to tasks that a model has mastered have no near ties, so quantization hardly ever changes them. The
    continuations of text have many.
    """
    per_task = max(1, count // 2 // len(TASKS))
    prompts = [encode(sample.prompt) for task in TASKS for sample in held_out_samples(task, per_task)]
    texts = held_out_passages(max(1, count - len(prompts)))
    return prompts + [encode(text)[:TEXT_PROMPT_TOKENS] for text in texts]


def held_out_passages(count: int) -> list[str]:
    """Returns ``count`` texts of a few sentences each, none of them from the training."""
    found = held_out_texts(count * SENTENCES_PER_TEXT)
    return ["".join(found[at : at + SENTENCES_PER_TEXT]) for at in range(0, len(found), SENTENCES_PER_TEXT)]
