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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch  # noqa: TID253  a script: nothing imports this module
import torch.nn.functional as F  # noqa: TID253
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config  # noqa: TID253

from trtx.checkpoint.held_out import Score, score_tasks, score_text
from trtx.checkpoint.shapes import SHAPES
from trtx.checkpoint.synthetic import config_json, write_model_files
from trtx.checkpoint.tasks import TASKS, samples
from trtx.checkpoint.text import NOUNS, sentences
from trtx.checkpoint.tokenizer import make_tokenizer

log = logging.getLogger("train_tiny")

SHAPE = SHAPES["tiny-trained"]
TOKENS_PER_STEP = 2048
ROW_LENGTHS = (128, 128, 512)  # short rows: an answer without context before it; long ones: far look-ups, few-shot
PROMPT_WEIGHT = 0.1  # prompts are mostly chance, so their loss says little; text counts in full
PEAK_LEARNING_RATE = 3e-3
WARM_UP_STEPS = 100
# Two-digit sums need the most samples, one-digit sums the fewest.
MIX = {"addition-1": 1, "addition-2": 5, "subtraction": 4, "copying": 2, "look-up": 4, "json": 2, "text": 2}


@dataclass(frozen=True, slots=True)
class Rows:
    """One step's rows: token ids ``[rows, length]`` int64 and the loss weight of each token as a target, float32."""

    ids: torch.Tensor
    weights: torch.Tensor


def documents(encode: Any, seed: int) -> Iterator[tuple[list[int], list[float]]]:
    """Training documents without end: token ids and loss weights, plain and in the chat template, half and half."""
    rng = random.Random(seed)
    streams = {task: samples(task, "train", seed) for task in TASKS}
    text = sentences(seed + 1, 10**9)
    names, shares = list(MIX), list(MIX.values())
    while True:
        name = rng.choices(names, shares)[0]
        if name == "text":
            ids = encode("".join(next(text) for _ in range(rng.randint(1, 4))) + "<|endoftext|>")
            yield ids, [1.0] * len(ids)
            continue
        sample = next(streams[name])
        prompt, answer = sample.chat() if rng.random() < 0.5 else sample.plain()
        prompt_ids, answer_ids = encode(prompt), encode(answer)
        yield prompt_ids + answer_ids, [PROMPT_WEIGHT] * len(prompt_ids) + [1.0] * len(answer_ids)


def corpus(seed: int) -> Iterator[str]:
    """What the tokenizer is trained on: text and tasks, so that the words to copy are mostly one token each."""
    yield from sentences(seed, 3000)
    for task in TASKS:
        for sample in itertools.islice(samples(task, "train", seed), 1500):
            yield f"{sample.prompt} {sample.answer}\n{sample.answer}\n"
    for noun in NOUNS:
        yield from (noun, f" {noun}") * 50


def rows(encode: Any, seed: int) -> Iterator[Rows]:
    """Steps without end. A row starts with a document and is filled with more of them; the last one is cut."""
    source = documents(encode, seed)
    for step in range(10**9):
        length = ROW_LENGTHS[step % len(ROW_LENGTHS)]
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
        yield Rows(torch.tensor(ids), torch.tensor(weights))


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
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(0, 0.6 / math.sqrt(module.in_features))
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=PEAK_LEARNING_RATE,
        betas=(0.9, 0.98),
        fused=True,
    )
    started, step, evaluated, tokens = time.monotonic(), 0, 0.0, 0
    for batch in rows(encode, seed):
        # The schedule follows the clock, so that the run fits its minutes on any machine.
        done = (time.monotonic() - started) / (minutes * 60)
        if done >= 1:
            break
        rate = PEAK_LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - min(done, 0.99))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=batch.ids[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
        loss = (losses * batch.weights.flatten()).sum() / batch.weights.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        tokens += batch.ids.numel()
        if step % 50 == 0:
            log.info("step %d  %3.0f %%  loss %.3f  %.0f tokens/s", step, 100 * done, loss.item(),
                     tokens / (time.monotonic() - started))  # fmt: skip
        if done - evaluated >= 0.2:
            evaluated = done
            save(model, out)
            log.info("%s", table(score_tasks(model, tokenizer, per_task=50)))
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
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("tiny_trained"))
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(arguments.out, arguments.minutes, arguments.seed, arguments.threads)


if __name__ == "__main__":
    main()
