"""Trains ``synthetic:tiny-trained`` on a CPU: ``python -m trtx.checkpoint.train_tiny --minutes 20 --threads 2``.

Writes a Hugging Face directory with bfloat16 weights and ``TRAINING.md``, the report. Checkpoints as it goes: the
directory is loadable from the first evaluation on, and an interrupted run leaves its last evaluation there.
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

import torch  # noqa: TID253  a script: nothing imports this module
import torch.nn.functional as F  # noqa: TID253
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config  # noqa: TID253

from trtx.checkpoint.held_out import Score, score_tasks, score_text
from trtx.checkpoint.shapes import SHAPES
from trtx.checkpoint.synthetic import TRAINED_DIRECTORY, config_json, write_model_files
from trtx.checkpoint.tasks import TASKS, samples
from trtx.checkpoint.text import NOUNS, sentences
from trtx.checkpoint.tokenizer import END_OF_TEXT, make_tokenizer

log = logging.getLogger("train_tiny")

SHAPE = SHAPES["tiny-trained"]
TOKENS_PER_STEP = 2048
# Short rows make the circuits that copy; long ones, later and dearer, stretch them over a longer context.
ROW_LENGTHS_FIRST, ROW_LENGTHS_LATER, LATER_FROM = (128,), (128, 512), 0.7
# Prompts and text are mostly chance: their full loss would drown the answers' in noise.
PROMPT_WEIGHT, TEXT_WEIGHT = 0.05, 0.25
EMBEDDING_STD = 0.04
MUON_RATE, ADAM_RATE = 0.02, 4e-3  # peaks: matrices of the layers, everything else
WARM_UP_STEPS = 30
# Words said over and over: what copying and look-up are made from forms on them first, in minutes of one core.
REPETITION_UNTIL, REPETITION_SHARE = 0.5, 8
# One-digit sums need the fewest samples.
MIX = {"addition-1": 1, "addition-2": 4, "subtraction": 3, "copying": 4, "look-up": 4, "json": 2, "text": 1}


@dataclass(frozen=True, slots=True)
class Rows:
    """One step's rows: token ids ``[rows, length]`` int64 and the loss weight of each token as a target, float32."""

    ids: torch.Tensor
    weights: torch.Tensor


def repetition(rng: random.Random) -> str:
    """A few random words, said three times or more."""
    words = " ".join(rng.choice(NOUNS) for _ in range(rng.randint(2, 10)))
    return " ".join([words] * rng.randint(3, 5))


class Documents:
    """Training documents without end: token ids and loss weights, plain and in the chat template, half and half."""

    def __init__(self, encode: Callable[[str], list[int]], seed: int) -> None:
        self._encode = encode
        self._rng = random.Random(seed)
        self._tasks = {task: samples(task, "train", seed) for task in TASKS}
        self._text = sentences(seed + 1, 10**9)
        self.shares = {**MIX, "repetition": REPETITION_SHARE}

    def __next__(self) -> tuple[list[int], list[float]]:
        rng, encode = self._rng, self._encode
        name = rng.choices(list(self.shares), list(self.shares.values()))[0]
        if name == "text":
            ids = encode("".join(next(self._text) for _ in range(rng.randint(1, 4))) + END_OF_TEXT)
            return ids, [TEXT_WEIGHT] * len(ids)
        if name == "repetition":
            ids = encode(repetition(rng) + END_OF_TEXT)
            return ids, [1.0] * len(ids)
        sample = next(self._tasks[name])
        prompt, answer = sample.chat() if rng.random() < 0.5 else sample.plain()
        prompt_ids, answer_ids = encode(prompt), encode(answer)
        return prompt_ids + answer_ids, [PROMPT_WEIGHT] * len(prompt_ids) + [1.0] * len(answer_ids)


def corpus(seed: int) -> Iterator[str]:
    """What the tokenizer is trained on: text and tasks, so that the words to copy are mostly one token each."""
    yield from sentences(seed, 3000)
    for task in TASKS:
        for sample in itertools.islice(samples(task, "train", seed), 1500):
            yield f"{sample.prompt} {sample.answer}\n{sample.answer}\n"
    for noun in NOUNS:
        yield from (noun, f" {noun}") * 50


def fill_rows(source: Documents, length: int) -> Rows:
    """One step's rows. A row starts with a document and is filled with more of them; the last one is cut."""
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
    """Layers add nothing at first (output projections are zero), so that a token's identity is not drowned in noise."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_(0, EMBEDDING_STD)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif parameter.ndim == 2:
                parameter.normal_(0, 0.6 / math.sqrt(parameter.shape[1]))


def train(out: Path, minutes: float, seed: int, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    config = config_json(SHAPE)
    files = make_tokenizer(config["vocab_size"], config["max_position_embeddings"], corpus(seed))
    write_model_files(config, files, out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    backend = tokenizer.backend_tokenizer

    def encode(text: str) -> list[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    model = AutoModelForCausalLM.from_config(
        Qwen3Config.from_pretrained(out), dtype=torch.float32, attn_implementation="eager"
    )  # on a CPU faster than sdpa at these lengths
    initialize(model)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in name]
    optimizers = (
        (torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.0), MUON_RATE),
        (torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0), ADAM_RATE),
    )
    started, step, evaluated, tokens = time.monotonic(), 0, 0.0, 0
    source = Documents(encode, seed)
    while True:
        # The schedule follows the clock, so that the run fits its minutes on any machine.
        done = (time.monotonic() - started) / (minutes * 60)
        if done >= 1:
            break
        lengths = ROW_LENGTHS_FIRST if done < LATER_FROM else ROW_LENGTHS_LATER
        batch = fill_rows(source, lengths[step % len(lengths)])
        if done >= REPETITION_UNTIL:
            source.shares["repetition"] = 0
        scale = min(1.0, (step + 1) / WARM_UP_STEPS, 1.5 * (1 - done))
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * scale
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=batch.ids[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
        loss = (losses * batch.weights.flatten()).sum() / batch.weights.sum()
        model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer, _ in optimizers:
            optimizer.step()  # type: ignore[no-untyped-call]
        step += 1
        tokens += batch.ids.numel()
        if step % 50 == 0:
            log.info("step %d  %3.0f %%  loss %.3f  %.0f tokens/s", step, 100 * done, loss.item(),
                     tokens / (time.monotonic() - started))  # fmt: skip
        if done - evaluated >= 0.15:
            evaluated = done
            save(model, out)
            log.info("%s", table(score_tasks(model, tokenizer, per_task=10)))
            model.train()
    save(model, out)
    seconds = time.monotonic() - started
    finished = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    report = REPORT.format(
        command=f"python -m trtx.checkpoint.train_tiny --minutes {minutes:g} --threads {threads} --seed {seed}",
        seconds=seconds,
        steps=step,
        tokens=tokens / 1e6,
        threads=threads,
        parameters=sum(p.numel() for p in finished.parameters()),
        torch=torch.__version__.split("+")[0],
        table=table(score_tasks(finished, tokenizer, per_task=200)),
        perplexity=score_text(finished, tokenizer, count=400),
    )
    (out / "TRAINING.md").write_text(report, encoding="utf-8")
    log.info("%s", report)


REPORT = """# synthetic:tiny-trained

Trained from scratch by `{command}`.

{parameters:,} parameters, {steps:,} steps, {tokens:.1f} million tokens, {seconds:.0f} s on {threads} CPU threads,
torch {torch}. Scored after the rounding to bfloat16, computed in float32. The held-out split is decided by a hash of
a task's content (`trtx/checkpoint/tasks.py`); no held-out content is ever trained on.

Exact match of the whole answer, end token included, greedy, 200 held-out samples a task and form; `perplexity` is
that of the answer's tokens:

{table}

Perplexity of held-out generated text: {perplexity:.2f} a token.

Same seed, same samples; the weights differ between runs, since the schedule follows the clock.
"""


def table(scores: list[Score]) -> str:
    lines = ["| task | plain | chat | perplexity, plain | perplexity, chat |", "|---|---|---|---|---|"]
    for s in scores:
        lines.append(
            f"| {s.task} | {s.plain:.1%} | {s.chat:.1%} | {s.plain_perplexity:.3f} | {s.chat_perplexity:.3f} |"
        )
    return "\n".join(lines)


def save(model: Any, out: Path) -> None:
    """bfloat16 safetensors under the names of the Hugging Face checkpoint; the tied head is not stored twice."""
    from safetensors.torch import save_file

    state = {name: value.detach().bfloat16().contiguous() for name, value in model.state_dict().items()}
    state.pop("lm_head.weight", None)
    path = out / "model.safetensors"
    save_file(state, path, metadata={"format": "pt"})
    path.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trtx.checkpoint.train_tiny", description=__doc__)
    parser.add_argument("--out", type=Path, default=TRAINED_DIRECTORY)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(arguments.out, arguments.minutes, arguments.seed, arguments.threads)


if __name__ == "__main__":
    main()
