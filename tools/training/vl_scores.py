"""Scores ``synthetic:tiny-vl-trained`` on held-out images with transformers, and writes the report ``TRAINING.md``.

``python tools/training/vl_scores.py`` scores the stored weights and rewrites the second part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from picture_tasks import TASKS, PictureSample, held_out, turn
from pictures import draw
from text_scores import share_text
from transformers import AutoImageProcessor, AutoTokenizer, LlavaForConditionalGeneration

from trtx.checkpoint.shapes import SHAPES
from trtx.checkpoint.synthetic import trained_directory

PER_TASK = 200
_BATCH = 20
_SCORE = "## Held-out score"


@dataclass(frozen=True, slots=True)
class PictureScore:
    """The number of exact answers, including the end token, to ``count`` questions of one task."""

    task: str
    count: int
    right: int


def score_pictures(
    model: Any, tokenizer: Any, processor: Any, count: int, tasks: Sequence[str] = TASKS
) -> list[PictureScore]:
    """Scores ``count`` held-out questions of each task, rendered by the chat template with the images first.

    Greedy decoding gives exactly the answer if and only if each of its ids is the most likely one given the prompt and
    the previous ids, so one forward per batch suffices.
    """
    model.eval()
    scores = []
    for task in tasks:
        samples, right = list(held_out(task, count)), 0
        for at in range(0, count, _BATCH):
            right += _exact(model, tokenizer, processor, samples[at : at + _BATCH])
        scores.append(PictureScore(task, count, right))
    return scores


def _exact(model: Any, tokenizer: Any, processor: Any, samples: Sequence[PictureSample]) -> int:
    placeholder, rows = model.config.image_token_id, model.config.image_seq_length
    ids, firsts = [], []
    for sample in samples:
        prompt, answer = turn(sample.question, len(sample.scenes))
        own: list[int] = []
        for token in tokenizer.encode(prompt, add_special_tokens=False):
            own += [token] * (rows if token == placeholder else 1)
        firsts.append(len(own))
        ids.append(own + tokenizer.encode(answer, add_special_tokens=False))
    width = max(map(len, ids))
    pixels = processor([draw(scene) for sample in samples for scene in sample.scenes], return_tensors="pt")
    with torch.inference_mode():  # attention is causal, so padding at the end does not affect earlier positions
        rows_of_ids = torch.tensor([one + [0] * (width - len(one)) for one in ids])
        best = model(input_ids=rows_of_ids, pixel_values=pixels["pixel_values"], use_cache=False).logits.argmax(-1)
    return sum(
        found[first - 1 : len(one) - 1].tolist() == one[first:]
        for found, one, first in zip(best, ids, firsts, strict=True)
    )


def score_table(scores: Sequence[PictureScore]) -> str:
    lines = ["| task | n | right, % |", "|---|--:|--:|"]
    lines += [f"| {score.task} | {score.count} | {share_text(score.right, score.count)} |" for score in scores]
    return "\n".join(lines)


_TRAINING = """# synthetic:tiny-vl-trained

Trained from scratch by `{command}`:
{steps:,} steps, {pictures:,} pictures, {seconds:.0f} s, {cpu_seconds:.0f} s of CPU, torch {torch}. Same
seed, same pictures in the same order.

"""

_SCORES = """{heading}

By `python tools/training/vl_scores.py`, after the rounding to bfloat16 and computed in float32 by transformers. A
picture's content decides its split by a hash (`tools/training/pictures.py`), and the splits share no size: no held-out
content was ever trained on, nor a picture with a side of so many pixels.

Exact match of the whole answer, end token included, greedy, in per cent with Wilson's 95 % interval; n held-out
questions through the chat template, the pictures before the question.

{table}

{parameters:,} parameters.
"""


def write_training(out: Path, command: str, steps: int, spent: Any) -> None:
    """Writes the first part of the report; replaces the whole file. ``spent.tokens`` counts images."""
    text = _TRAINING.format(
        command=command,
        steps=steps,
        pictures=spent.tokens,
        seconds=spent.seconds,
        cpu_seconds=spent.cpu_seconds,
        torch=torch.__version__.split("+")[0],
    )
    (out / "TRAINING.md").write_text(text, encoding="utf-8")


def write_scores(out: Path, count: int = PER_TASK) -> None:
    """Measures the weights in ``out`` on ``count`` questions per task and writes the second part of the report."""
    model = LlavaForConditionalGeneration.from_pretrained(out, dtype=torch.float32)
    tokenizer, processor = AutoTokenizer.from_pretrained(out), AutoImageProcessor.from_pretrained(out)
    scores = _SCORES.format(
        heading=_SCORE,
        table=score_table(score_pictures(model, tokenizer, processor, count)),
        parameters=sum(p.numel() for p in model.parameters()),
    )
    report = out / "TRAINING.md"
    report.write_text(report.read_text(encoding="utf-8").partition(_SCORE)[0] + scores, encoding="utf-8")


if __name__ == "__main__":
    write_scores(trained_directory(SHAPES["tiny-vl-trained"]))
