"""Trains ``synthetic:tiny-trained``: ``python tools/training/train_tiny.py``, 18 minutes of one core.

Writes a Hugging Face directory with bfloat16 weights and ``TRAINING.md``, the report. The directory can be loaded from
the first evaluation on. An interrupted run leaves the file ``--state``, and the same command resumes from it.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from text_scores import score_tasks
from training_report import table, write_scores, write_training
from training_run import Spent, descend, encoder, resume, save, set_rates, suspend
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from trtx.checkpoint.shapes import SHAPES
from trtx.checkpoint.synthetic import TRAINED_DIRECTORY, config_json, write_model_files
from trtx.checkpoint.tasks import TASKS, TrainingSample, samples
from trtx.checkpoint.text import NOUNS, sentences
from trtx.checkpoint.tokenizer import END_OF_TEXT, make_tokenizer

log = logging.getLogger("train_tiny")

SHAPE = SHAPES["tiny-trained"]
STEPS, TOKENS_PER_STEP = 2000, 4096
# The long rows, which cost more, come later and extend to a longer context what the short rows have taught.
ROW_LENGTHS_FIRST, ROW_LENGTHS_LATER, LATER_FROM = (128,), (128, 512), 0.7
# Prompts and text are mostly random: at full weight, their loss would drown the loss of the answers in noise.
PROMPT_WEIGHT, TEXT_WEIGHT = 0.05, 0.25
MUON_RATE, ADAM_RATE = 0.015, 4e-3  # peak learning rates: of the layers' matrices, and of everything else
WARM_UP_STEPS, LAST_RATE = 50, 0.02
MIX = {
    "addition-1": 1.0,
    "addition-2": 3.0,
    "subtraction": 3.0,
    "copying": 4.0,
    "look-up": 6.0,
    "json": 2.0,
    "text": 1.0,
}
# Reading a table is expensive and an answer is one word, so half of the tables get several questions in one chat.
QUESTIONS_PER_TABLE = 6
EMBEDDING_STD = 0.04
# The heads of the first layer are initialized to attend 1, 2, 3 and 4 tokens back. See initialize().
CONSTANT, OFFSET_PAIRS, OFFSET_GAIN, OFFSET_NOISE = 4 * EMBEDDING_STD, 6, 2.0, 0.1
STATE_EVERY, EVALUATE_EVERY = 50, 250


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step: token ids ``[rows, length + 1]`` int64; loss weight of each target ``[rows, length]``."""

    ids: torch.Tensor
    weights: torch.Tensor


class Documents:
    """An endless iterator over the training documents of one step: token ids and loss weights, plain and as chats.

    ``seed`` and ``step`` determine the documents, so a resumed run sees the same documents as an uninterrupted one.
    """

    def __init__(self, encode: Callable[[str], list[int]], seed: int, step: int) -> None:
        self._encode = encode
        self._rng = random.Random(f"{seed}/{step}")
        step_seed = self._rng.getrandbits(40)
        self._tasks = {task: samples(task, "train", step_seed) for task in TASKS}
        self._text = sentences(step_seed, 10**9)

    def __next__(self) -> tuple[list[int], list[float]]:
        rng, encode = self._rng, self._encode
        name = rng.choices(list(MIX), list(MIX.values()))[0]
        if name == "text":
            ids = encode("".join(next(self._text) for _ in range(rng.randint(1, 4))) + END_OF_TEXT)
            return ids, [TEXT_WEIGHT] * len(ids)
        sample = next(self._tasks[name])
        if rng.random() >= 0.5:
            turns = [sample.plain()]
        elif name == "look-up" and rng.random() < 0.5:
            turns = several_questions(sample, rng)
        else:
            turns = [sample.chat()]
        ids, weights = [], []
        for prompt, answer in turns:
            prompt_ids, answer_ids = encode(prompt), encode(answer)
            ids += prompt_ids + answer_ids
            weights += [PROMPT_WEIGHT] * len(prompt_ids) + [1.0] * len(answer_ids)
        return ids, weights


def several_questions(table: TrainingSample, rng: random.Random) -> list[tuple[str, str]]:
    """Returns a chat with several questions about one look-up table, as pairs of prompt and completion."""
    pairs = [entry.split(" is ") for entry in table.key.split(", ")]
    before, turns = f"{table.key}. ", list[tuple[str, str]]()
    for name, value in rng.sample(pairs, min(len(pairs), QUESTIONS_PER_TABLE)):
        question = rng.choice((f"{name} ->", f"What is {name}?"))
        prompt, answer = TrainingSample("look-up", before + question, value, table.key).chat()
        turns.append((prompt if not turns else f"\n{prompt}", answer))
        before = ""
    return turns


def corpus(seed: int) -> Iterator[str]:
    """Yields the tokenizer's training text: text and tasks, so that most words to copy become one token each."""
    yield from sentences(seed, 3000)
    for task in TASKS:
        for sample in itertools.islice(samples(task, "train", seed), 1500):
            yield f"{sample.prompt} {sample.answer}\n{sample.answer}\n"
    for noun in NOUNS:
        yield from (noun, f" {noun}") * 50


def fill_rows(source: Documents, length: int) -> Rows:
    """Returns the rows of one step. A row consists of whole documents; the last one is truncated."""
    ids, weights = [], []
    for _ in range(TOKENS_PER_STEP // length):
        row_ids: list[int] = []
        row_weights: list[float] = []
        while len(row_ids) < length + 1:
            more_ids, more_weights = next(source)
            row_ids += more_ids
            row_weights += more_weights
        ids.append(row_ids[: length + 1])
        weights.append(row_weights[1 : length + 1])
    return Rows(torch.tensor(ids), torch.tensor(weights))


def initialize(model: Any) -> None:
    """Initializes the weights. Output projections are zero, so that at first no layer adds noise to a token's identity.

    The look-up task needs a head that carries a name to its value, another that carries it to the question, and a third
    that matches the two. From random weights none of them helps before the others exist, and after 9 million tokens the
    task is still at chance. The first two kinds of heads are therefore built in: one dimension of the embedding is the
    same for every token, the queries and keys of the first layer are computed from it, and the rotation of the
    positions makes head ``h`` attend ``h + 1`` tokens back. (The idea: Trockman and Kolter, Mimetic Initialization of
    Self-Attention Layers, 2023.)
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_(0, EMBEDDING_STD)
                parameter[:, 0] = CONSTANT
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif parameter.ndim == 2:
                parameter.normal_(0, 0.6 / math.sqrt(parameter.shape[1]))
        head_dim, theta = model.config.head_dim, model.config.rope_parameters["rope_theta"]
        first = model.model.layers[0].self_attn
        for projection, norm, looks_back in (
            (first.q_proj, first.q_norm, True),
            (first.k_proj, first.k_norm, False),
        ):
            projection.weight.mul_(OFFSET_NOISE)
            norm.weight.fill_(OFFSET_GAIN)
            for head, rows in enumerate(projection.weight.view(-1, head_dim, projection.in_features)):
                for pair in range(OFFSET_PAIRS):  # the pairs of highest frequency: their sum has the narrowest peak
                    angle = -(head + 1) * theta ** (-2 * pair / head_dim) if looks_back else 0.0
                    rows[pair, 0], rows[pair + head_dim // 2, 0] = math.cos(angle), math.sin(angle)


def rate(step: int, steps: int) -> float:
    """Returns the learning rate as a share of its peak: a linear warm-up, then half a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (LAST_RATE + (1 - LAST_RATE) * cosine)


def train(out: Path, state: Path, steps: int, seed: int, threads: int, device: str) -> None:
    """Trains the model. If the file ``state`` of an interrupted run exists, resumes from it."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    state.parent.mkdir(parents=True, exist_ok=True)
    config = config_json(SHAPE)
    files = make_tokenizer(config["vocab_size"], config["max_position_embeddings"], corpus(seed))
    write_model_files(config, files, out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    encode = encoder(tokenizer)

    model = AutoModelForCausalLM.from_config(
        Qwen3Config.from_pretrained(out), dtype=torch.float32, attn_implementation="eager"
    )  # eager attention is faster than sdpa on a CPU at these lengths
    initialize(model)
    model.to(device)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in name]
    optimizers = (
        (torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.0), MUON_RATE),
        (torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0), ADAM_RATE),
    )
    begin, spent = resume(state, model, optimizers)
    wall, cpu = time.monotonic() - spent.seconds, time.process_time() - spent.cpu_seconds
    for step in range(begin, steps):
        lengths = ROW_LENGTHS_FIRST if step < LATER_FROM * steps else ROW_LENGTHS_LATER
        batch = fill_rows(Documents(encode, seed, step), lengths[step % len(lengths)])
        ids, weights = batch.ids.to(device), batch.weights.to(device)
        set_rates(optimizers, rate(step, steps))
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (losses * weights.flatten()).sum() / weights.sum()
        descend(model, optimizers, loss)
        spent = Spent(time.monotonic() - wall, time.process_time() - cpu, spent.tokens + batch.weights.numel())
        if (step + 1) % STATE_EVERY == 0:
            log.info("step %d of %d  loss %.3f  %.0f s, %.0f s of CPU", step + 1, steps, loss.item(),
                     spent.seconds, spent.cpu_seconds)  # fmt: skip
            suspend(state, model, optimizers, step + 1, spent)
        if (step + 1) % EVALUATE_EVERY == 0:
            save(model, out)
            log.info("\n%s", table(score_tasks(model, tokenizer, per_band=20)))
            model.train()
    save(model, out)
    command = f"python tools/training/train_tiny.py --steps {steps} --seed {seed} --threads {threads} --device {device}"
    where = f"{threads} CPU threads" if device == "cpu" else torch.cuda.get_device_name()
    write_training(out, command, steps, spent.tokens, spent.seconds, spent.cpu_seconds, where)
    write_scores(out)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/training/train_tiny.py", description=__doc__)
    parser.add_argument("--out", type=Path, default=TRAINED_DIRECTORY)
    parser.add_argument("--state", type=Path, default=Path("build/tiny-trained.pt"), help="what a cut run goes on from")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1, help="8 of them took ten times the CPU time of 1")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(arguments.out, arguments.state, arguments.steps, arguments.seed, arguments.threads, arguments.device)


if __name__ == "__main__":
    main()
