"""Trains ``synthetic:tiny-vl-trained``: ``python tools/training/train_tiny_vl.py``.

It first trains the tower and the projector on the content of each patch (``row_targets``), which gives a hundred small
targets per image instead of one per question. Then it freezes the tower and trains the projector and the decoder on
questions and answers.
Writes a Hugging Face directory with bfloat16 weights and ``TRAINING.md``, the report. The directory can be loaded from
the first evaluation on. An interrupted run leaves the file ``--state``, and the same command resumes from it.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from picture_tasks import Question, conversation, corpus, turn
from pictures import Kind, Scene, draw, draw_scene
from row_targets import row_targets, target_sizes
from train_tiny import rate
from training_run import Spent, encoder, resume, set_rates, suspend
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
)
from vl_scores import PER_TASK, score_pictures, score_table, write_scores, write_training

from trtx.checkpoint.shapes import SHAPES
from trtx.checkpoint.synthetic import config_json, trained_directory, write_model_files, write_processor_files
from trtx.checkpoint.text import sentences
from trtx.checkpoint.tokenizer import make_tokenizer

log = logging.getLogger("train_tiny_vl")

SHAPE = SHAPES["tiny-vl-trained"]
TOWER_STEPS, PICTURES = 3000, 64
STEPS, CONVERSATIONS, MOST_TURNS, HALVES = 1500, 32, 5, 2
AFTER_SHARE = 0.25  # the share of conversations whose images come after the first question
PROMPT_WEIGHT = 0.02
GROUND_WEIGHT = 0.1  # the loss weight of a row without a shape; most rows have none
TOWER_KINDS: dict[Kind, float] = {"one": 4.0, "two": 4.0, "count": 1.0, "digit": 3.0}
MUON_RATE, ADAM_RATE = 0.015, 3e-3
EMBEDDING_STD, PLACE_STD = 0.04, 0.2
EDGE_GAIN, MEAN_GAIN = 0.2, 0.06
STATE_EVERY, EVALUATE_EVERY = 50, 500


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations of similar length.

    ``ids``: ``[rows, length + 1]`` int64, padded at the end. ``weights``: the loss weight of each target id, float32.
    ``pixels``: ``[images, 3, side, side]`` float32, in the order of the placeholders in the rows.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    pixels: torch.Tensor


class Conversations:
    """Generates the batches of each step. ``seed`` and ``step`` determine them, so a resumed run sees the same ones."""

    def __init__(self, encode: Callable[[str], list[int]], pixels: Callable[[Scene], torch.Tensor], rows: int) -> None:
        self._encode, self._pixels, self._rows = encode, pixels, rows
        self._placeholder = SHAPE.config["image_token_index"]

    def step(self, seed: int, step: int) -> Iterator[Batch]:
        rng = random.Random(f"{seed}/{step}")
        drawn = [conversation(rng, "train") for _ in range(CONVERSATIONS)]
        made = [(scenes, *self._row(rng, scenes, asked)) for scenes, asked in drawn]
        made.sort(key=lambda row: len(row[1]))
        size = CONVERSATIONS // HALVES
        for at in range(0, CONVERSATIONS, size):
            yield self._batch(made[at : at + size])

    def _row(
        self, rng: random.Random, scenes: Sequence[Scene], asked: Sequence[Question]
    ) -> tuple[list[int], list[float]]:
        ids, weights = [], []
        for index, question in enumerate(asked[: rng.randint(1, MOST_TURNS)]):
            pictures = len(scenes) if index == 0 else 0
            prompt, answer = turn(question, pictures, after=rng.random() < AFTER_SHARE)
            prompt_ids, answer_ids = self._encode(("\n" if index else "") + prompt), self._encode(answer)
            for token in prompt_ids:
                copies = self._rows if token == self._placeholder else 1
                ids += [token] * copies
                weights += [0.0 if token == self._placeholder else PROMPT_WEIGHT] * copies
            ids += answer_ids
            weights += [1.0] * len(answer_ids)
        return ids, weights

    def _batch(self, rows: Sequence[tuple[Sequence[Scene], list[int], list[float]]]) -> Batch:
        width = max(len(ids) for _, ids, _ in rows)
        return Batch(
            torch.tensor([ids + [0] * (width - len(ids)) for _, ids, _ in rows]),
            torch.tensor([weights[1:] + [0.0] * (width - len(weights)) for _, _, weights in rows]),
            torch.stack([self._pixels(scene) for scenes, _, _ in rows for scene in scenes]),
        )


def initialize(model: Any) -> None:
    """Initializes the weights. Output projections are zero, so that at first no layer adds noise to a row's content.

    A patch's position embedding, the sum of a vector for its row and one for its column, has about the same magnitude
    as its content. The patch embedding's filters are cosines, lowest frequencies first, scaled so that a patch's mean
    is no stronger than its edges.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_(0, EMBEDDING_STD)
            elif name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight", "fc2.weight")):
                parameter.zero_()
            elif "position_embedding" in name:
                side = isqrt(len(parameter) - 1)
                row, column = torch.randn(2, side, parameter.shape[1]) * PLACE_STD
                parameter[1:] = (row[:, None] + column[None]).flatten(0, 1)
            elif "patch_embedding" in name:
                parameter.copy_(cosines(len(parameter), parameter.shape[-1]))
            elif parameter.ndim == 2:
                parameter.normal_(0, 0.6 / math.sqrt(parameter.shape[1]))


def cosines(count: int, side: int) -> torch.Tensor:
    """Returns ``[count, 3, side, side]``: the two-dimensional cosines of lowest frequency, each for every channel."""
    places = (torch.arange(side) + 0.5) * math.pi / side
    waves = [torch.cos(places * frequency) / math.sqrt(side / (2 if frequency else 1)) for frequency in range(side)]
    pairs = sorted(((v, u) for v in range(side) for u in range(side)), key=lambda pair: (sum(pair), pair))
    filters = torch.zeros(count, 3, side, side)
    for index in range(count):
        v, u = pairs[index // 3]
        filters[index, index % 3] = torch.outer(waves[v], waves[u]) * (EDGE_GAIN if v + u else MEAN_GAIN)
    return filters


def train(out: Path, state: Path, *, tower_steps: int, steps: int, seed: int, threads: int, scored: int) -> None:
    """Trains the model. If the file ``state`` of an interrupted run exists, resumes from it.

    ``scored``: the number of held-out questions per task in the report.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    state.parent.mkdir(parents=True, exist_ok=True)
    _write_files(out)
    tokenizer, processor = AutoTokenizer.from_pretrained(out), AutoImageProcessor.from_pretrained(out)
    encode = encoder(tokenizer)

    def pixels(scene: Scene) -> torch.Tensor:
        found: torch.Tensor = processor(draw(scene), return_tensors="pt")["pixel_values"][0]
        return found

    model = LlavaForConditionalGeneration(LlavaConfig.from_pretrained(out, attn_implementation="sdpa")).float()
    initialize(model)
    side = isqrt(model.config.image_seq_length)
    rows_head = torch.nn.Linear(model.config.text_config.hidden_size, sum(target_sizes(side)))
    trained = torch.nn.ModuleDict({"model": model, "rows_head": rows_head})
    parameters = list(trained.named_parameters())
    is_matrix = {name: p.ndim == 2 and not any(w in name for w in ("embed", "rows_head")) for name, p in parameters}
    optimizers = (
        (torch.optim.Muon([p for n, p in parameters if is_matrix[n]], lr=MUON_RATE, weight_decay=0.0), MUON_RATE),
        (
            torch.optim.AdamW(
                [p for n, p in parameters if not is_matrix[n]], lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0
            ),
            ADAM_RATE,
        ),
    )
    begin, spent = resume(state, trained, optimizers)
    wall, cpu = time.monotonic() - spent.seconds, time.process_time() - spent.cpu_seconds
    source = Conversations(encode, pixels, SHAPE.config["image_seq_length"])
    for step in range(begin, tower_steps + steps):
        in_tower = step < tower_steps
        share = rate(step, tower_steps) if in_tower else rate(step - tower_steps, steps)
        set_rates(optimizers, share)
        model.train()
        trained.zero_grad(set_to_none=True)
        if in_tower:
            loss, pictures = tower_step(model, rows_head, pixels, random.Random(f"{seed}/tower/{step}"))
        else:
            model.model.vision_tower.requires_grad_(False)
            loss, pictures = answers_step(model, source.step(seed, step))
        for optimizer, _ in optimizers:
            optimizer.step()  # type: ignore[no-untyped-call]
        spent = Spent(time.monotonic() - wall, time.process_time() - cpu, spent.tokens + pictures)
        if (step + 1) % 10 == 0:
            log.info("step %d of %d  loss %.3f  %.0f s, %.0f s of CPU", step + 1, tower_steps + steps, loss,
                     spent.seconds, spent.cpu_seconds)  # fmt: skip
        if (step + 1) % STATE_EVERY == 0:
            suspend(state, trained, optimizers, step + 1, spent)
        if not in_tower and (step + 1 - tower_steps) % EVALUATE_EVERY == 0:
            save(model, out)
            log.info("\n%s", score_table(score_pictures(model, tokenizer, processor, count=40)))
    save(model, out)
    arguments = f"--tower-steps {tower_steps} --steps {steps} --seed {seed} --threads {threads}"
    write_training(out, f"python tools/training/train_tiny_vl.py {arguments}", tower_steps + steps, spent)
    write_scores(out, scored)


def tower_step(
    model: Any, rows_head: torch.nn.Linear, pixels: Callable[[Scene], torch.Tensor], rng: random.Random
) -> tuple[float, int]:
    """Computes the gradients of a linear head that predicts the row targets of generated images.

    Returns the loss and the number of images.
    """
    kinds = rng.choices(list(TOWER_KINDS), list(TOWER_KINDS.values()), k=PICTURES)
    scenes = [draw_scene(rng, "train", kind) for kind in kinds]
    found = model.model.get_image_features(pixel_values=torch.stack([pixels(scene) for scene in scenes])).pooler_output
    side = isqrt(len(found[0]))
    targets = torch.tensor([row_targets(scene, side) for scene in scenes]).flatten(0, 1)  # [rows, 5]
    weights = torch.where(targets[:, 0] > 0, 1.0, GROUND_WEIGHT)
    parts = rows_head(torch.cat(found)).split(target_sizes(side), dim=-1)
    losses = [F.cross_entropy(part, targets[:, at], reduction="none") for at, part in enumerate(parts)]
    loss = (torch.stack(losses).sum(0) * weights).sum() / weights.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), PICTURES


def answers_step(model: Any, batches: Iterator[Batch]) -> tuple[float, int]:
    """Computes the gradients of the mean loss of the answers, with logits only for tokens of nonzero weight.

    Returns the loss and the number of images.
    """
    of_step = list(batches)
    answers, total = sum(float(batch.weights.sum()) for batch in of_step), 0.0
    for batch in of_step:
        states = model.model(input_ids=batch.ids[:, :-1], pixel_values=batch.pixels, use_cache=False).last_hidden_state
        counts = batch.weights > 0
        losses = F.cross_entropy(model.lm_head(states[counts]), batch.ids[:, 1:][counts], reduction="none")
        loss = (losses * batch.weights[counts]).sum() / answers
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total, sum(len(batch.pixels) for batch in of_step)


def _write_files(out: Path) -> None:
    config = config_json(SHAPE)
    text = config["text_config"]

    def learned_from() -> Iterator[str]:
        yield from corpus()
        yield from sentences(0, 1000)

    files = make_tokenizer(text["vocab_size"], text["max_position_embeddings"], learned_from(), SHAPE.media)
    write_model_files(config, files, out)
    assert SHAPE.processor is not None
    write_processor_files(SHAPE.processor, out)


def save(model: Any, out: Path) -> None:
    """Writes bfloat16 safetensors with transformers' tensor names; the tied head is not stored twice."""
    import copy

    copy.deepcopy(model).bfloat16().save_pretrained(out / "saving", safe_serialization=True)
    (out / "saving" / "model.safetensors").replace(out / "model.safetensors")
    for left in (out / "saving").iterdir():
        left.unlink()
    (out / "saving").rmdir()
    (out / "model.safetensors").chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/training/train_tiny_vl.py", description=__doc__)
    parser.add_argument("--out", type=Path, default=trained_directory(SHAPE))
    parser.add_argument("--state", type=Path, default=Path("build/tiny-vl-trained.pt"), help="what a cut run leaves")
    parser.add_argument("--tower-steps", type=int, default=TOWER_STEPS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scored", type=int, default=PER_TASK, help="held-out questions a task")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(
        arguments.out,
        arguments.state,
        tower_steps=arguments.tower_steps,
        steps=arguments.steps,
        seed=arguments.seed,
        threads=arguments.threads,
        scored=arguments.scored,
    )


if __name__ == "__main__":
    main()
