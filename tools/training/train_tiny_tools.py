"""Trains ``synthetic:tiny-tools``: ``python tools/training/train_tiny_tools.py``, 40 minutes of one core.

Writes a Hugging Face directory with bfloat16 weights and ``TRAINING.md``, the report. The chat template is written by
hand and read from the checkpoint. An interrupted run leaves the file ``--state``, and the same command resumes from it.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from muon import Float32Muon
from tool_conversations import Conversation, conversations
from tool_rendering import encoded, rendered
from tool_scores import score_kinds, score_table, write_scores, write_training
from tool_tokenizer import make_tool_tokenizer
from train_tiny import Rows, initialize
from training_run import Spent, descend, encoder, resume, save, set_rates, suspend
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from trtx.checkpoint.shapes import SHAPES
from trtx.checkpoint.synthetic import config_json, trained_directory, write_model_files

log = logging.getLogger("train_tiny_tools")

SHAPE = SHAPES["tiny-tools"]
TEMPLATE = trained_directory(SHAPE) / "chat_template.jinja"
STEPS, ROWS_PER_STEP = 3000, 14
# Conversations of one request, which are short, come first.
SHORT_STEPS, LONGEST_SHORT, LONGEST = 600, 320, 560
FORCED_BEGIN_WEIGHT = 0.05  # the grammar forces the first token of a forced call, so that the model need not expect it
MUON_RATE, ADAM_RATE = 0.015, 4e-3
# Rows of one step have similar lengths: they are drawn for four steps at once, sorted and cut in four.
STEPS_PER_DRAW = 4
STATE_EVERY, EVALUATE_EVERY = 40, 400
# The rate is constant until the last third, so that an interrupted run can be given fewer or more steps.
WARM_UP_STEPS, DECAY_SHARE, LAST_RATE = 40, 0.35, 0.02
CORPUS = 4000


def corpus(seed: int) -> Iterator[str]:
    """Yields the tokenizer's training text."""
    for conversation in itertools.islice(conversations("train", seed), CORPUS):
        for message in conversation.messages:
            yield from (message["content"], message.get("reasoning_content", ""))
        for tool in conversation.tools:
            yield from ("# Tools", '{"name": "', tool["function"]["name"], '", "parameters": {"', '"arguments": {"')
            for name, schema in tool["function"]["parameters"]["properties"].items():
                yield f'"{name}": "{schema.get("type")}"}}}}'


def row(
    tokenizer: Any, encode: Callable[[str], list[int]], conversation: Conversation
) -> tuple[list[int], list[float]]:
    """Returns a conversation's token ids, and the loss weight of each."""
    ids, answers = encoded(encode, rendered(tokenizer, conversation))
    weights = [0.0] * len(ids)
    for begin, end in answers:
        weights[begin:end] = [1.0] * (end - begin)
    if conversation.forced is not None:
        weights[answers[-1][0]] = FORCED_BEGIN_WEIGHT
    return ids, weights


def draw(tokenizer: Any, encode: Callable[[str], list[int]], seed: int, number: int) -> list[Rows]:
    """Returns the rows of ``STEPS_PER_DRAW`` steps, determined by the seed and the draw's number."""
    rng = random.Random(f"{seed}/{number}")
    is_short = number * STEPS_PER_DRAW < SHORT_STEPS
    drawn = conversations("train", rng.getrandbits(40), most_requests=1 if is_short else 3)
    longest = LONGEST_SHORT if is_short else LONGEST
    made = (one for one in (row(tokenizer, encode, one) for one in drawn) if len(one[0]) <= longest)
    rows = list(itertools.islice(made, STEPS_PER_DRAW * ROWS_PER_STEP))
    rows.sort(key=lambda one: len(one[0]))
    steps = [_padded(rows[at : at + ROWS_PER_STEP]) for at in range(0, len(rows), ROWS_PER_STEP)]
    rng.shuffle(steps)
    return steps


def _padded(rows: list[tuple[list[int], list[float]]]) -> Rows:
    width = max(len(ids) for ids, _ in rows)
    ids = [ids + [0] * (width - len(ids)) for ids, _ in rows]
    weights = [weights[1:] + [0.0] * (width - len(weights)) for _, weights in rows]
    return Rows(torch.tensor(ids), torch.tensor(weights))


def rate(step: int, steps: int) -> float:
    """Returns the learning rate as a share of its peak: a linear warm-up, then constant, then a linear decay."""
    left = (steps - step) / (DECAY_SHARE * steps)
    return min(1.0, (step + 1) / WARM_UP_STEPS, LAST_RATE + (1 - LAST_RATE) * left)


def train(out: Path, state: Path, steps: int, seed: int, threads: int, scored: int) -> None:
    """Trains the model. If the file ``state`` of an interrupted run exists, resumes from it."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    state.parent.mkdir(parents=True, exist_ok=True)
    config = config_json(SHAPE)
    template = TEMPLATE.read_text(encoding="utf-8")
    files = make_tool_tokenizer(config["vocab_size"], config["max_position_embeddings"], corpus(seed), template)
    write_model_files(config, files, out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    encode = encoder(tokenizer)

    model = AutoModelForCausalLM.from_config(
        Qwen3Config.from_pretrained(out), dtype=torch.float32, attn_implementation="sdpa"
    )
    initialize(model)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in name]
    optimizers = (
        (Float32Muon(matrices, MUON_RATE), MUON_RATE),
        (torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0), ADAM_RATE),
    )
    begin, spent = resume(state, model, optimizers)
    wall, cpu = time.monotonic() - spent.seconds, time.process_time() - spent.cpu_seconds
    rows: list[Rows] = []
    for step in range(begin, steps):
        if step % STEPS_PER_DRAW == 0 or not rows:
            rows = draw(tokenizer, encode, seed, step // STEPS_PER_DRAW)[step % STEPS_PER_DRAW :]
        batch = rows.pop(0)
        set_rates(optimizers, rate(step, steps))
        hidden = model.model(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state
        has_loss = batch.weights > 0
        logits = F.linear(hidden[has_loss], model.model.embed_tokens.weight)
        losses = F.cross_entropy(logits, batch.ids[:, 1:][has_loss], reduction="none")
        loss = (losses * batch.weights[has_loss]).sum() / batch.weights.sum()
        descend(model, optimizers, loss)
        spent = Spent(time.monotonic() - wall, time.process_time() - cpu, spent.tokens + batch.weights.numel())
        if (step + 1) % STATE_EVERY == 0:
            log.info("step %d of %d  loss %.3f  %.0f s, %.0f s of CPU", step + 1, steps, loss.item(),
                     spent.seconds, spent.cpu_seconds)  # fmt: skip
            suspend(state, model, optimizers, step + 1, spent)
        if (step + 1) % EVALUATE_EVERY == 0:
            save(model, out)
            log.info("\n%s", score_table(score_kinds(model, tokenizer, count=20)))
            model.train()
    save(model, out)
    command = f"python tools/training/train_tiny_tools.py --steps {steps} --seed {seed} --threads {threads}"
    write_training(out, command, steps, spent)
    write_scores(out, scored)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tools/training/train_tiny_tools.py", description=__doc__)
    parser.add_argument("--out", type=Path, default=trained_directory(SHAPE))
    parser.add_argument("--state", type=Path, default=Path("build/tiny-tools.pt"), help="what a cut run goes on from")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scored", type=int, default=200, help="held-out conversations of each kind")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    train(arguments.out, arguments.state, arguments.steps, arguments.seed, arguments.threads, arguments.scored)


if __name__ == "__main__":
    main()
