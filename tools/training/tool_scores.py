"""Scores ``synthetic:tiny-tools`` on held-out conversations, and writes its report ``TRAINING.md``.

``python tools/training/tool_scores.py`` scores the stored weights and rewrites the second part.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from text_scores import share_text
from tool_conversations import MIX, Conversation, conversations
from tool_rendering import encoded, rendered
from training_run import Spent
from transformers import AutoModelForCausalLM, AutoTokenizer

from trtx.checkpoint.shapes import SHAPES
from trtx.checkpoint.synthetic import trained_directory

_BATCH = 25
_SCORE = "## Held-out score"
PER_KIND = 200

_TRAINING = """# synthetic:tiny-tools

Trained from scratch by `{command}`: {steps:,} steps, {tokens:.1f} million tokens, {seconds:.0f} s on a shared CPU,
{cpu_seconds:.0f} s of CPU, torch {torch}. Same seed, same conversations in the same order.

"""
_SCORES = """{heading}

By `python tools/training/tool_scores.py`, after the rounding to bfloat16 and computed in float32. A hash of the
content decides the split: no name of a place or thing, no pair of numbers, no wording and, in the row of unseen tools,
no topic of the held-out requests is ever trained on.

Exact match, end token included, greedy, in per cent with Wilson's 95 % interval; n held-out conversations. `calls`:
every call of the conversation has the right name and arguments, and no call is made where none is right. `whole`: every
turn of the model is exactly right. `thinking`: the same with `enable_thinking`, thoughts included.

{table}

{parameters:,} parameters.
"""


@dataclass(frozen=True, slots=True)
class KindScore:
    """The number of conversations of one kind whose calls, and whose turns, are all exactly right."""

    kind: str
    count: int
    calls: int
    whole: int
    thinking: int


def score_kinds(model: Any, tokenizer: Any, count: int) -> list[KindScore]:
    """Scores ``count`` held-out conversations of each kind.

    The template renders the model's earlier turns as the model wrote them. One forward over a right conversation
    therefore shows whether greedy decoding gives each of its turns.
    """
    scores = []
    for make in MIX:
        plain, thinking = (
            list(itertools.islice(conversations("held-out", 0, make, thinks=thinks), count)) for thinks in (False, True)
        )
        turns = right_turns(model, tokenizer, plain)
        # The last turn is the answer, and the turns before it are the calls. An answer alone is right without a call.
        calls = sum(all(right[:-1] or right) for right in turns)
        thought = sum(map(all, right_turns(model, tokenizer, thinking)))
        scores.append(KindScore(plain[0].kinds[0], count, calls, sum(map(all, turns)), thought))
    return scores


def right_turns(model: Any, tokenizer: Any, conversations: Sequence[Conversation]) -> list[list[bool]]:
    """Returns for each of the model's turns of each conversation whether greedy decoding gives exactly this turn."""
    backend = tokenizer.backend_tokenizer
    found: list[list[bool]] = []
    for at in range(0, len(conversations), _BATCH):
        made = [
            encoded(lambda text: backend.encode(text, add_special_tokens=False).ids, rendered(tokenizer, one))
            for one in conversations[at : at + _BATCH]
        ]
        width = max(len(ids) for ids, _ in made)
        rows = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in made])
        with torch.inference_mode():  # attention is causal, so padding at the end does not affect earlier positions
            chosen = model(input_ids=rows, use_cache=False).logits.argmax(-1)
        for (ids, answers), row in zip(made, chosen.tolist(), strict=True):
            found.append([row[begin - 1 : end - 1] == ids[begin:end] for begin, end in answers])
    return found


def score_table(scores: list[KindScore]) -> str:
    lines = ["| conversation | n | calls | whole | thinking |", "|---|--:|--:|--:|--:|"]
    for one in scores:
        shares = (share_text(right, one.count) for right in (one.calls, one.whole, one.thinking))
        lines.append(f"| {one.kind} | {one.count} | {' | '.join(shares)} |")
    return "\n".join(lines)


def write_training(out: Path, command: str, steps: int, spent: Spent) -> None:
    """Writes the first part of the report; replaces the whole file."""
    text = _TRAINING.format(
        command=command,
        steps=steps,
        tokens=spent.tokens / 1e6,
        seconds=spent.seconds,
        cpu_seconds=spent.cpu_seconds,
        torch=torch.__version__.split("+")[0],
    )
    (out / "TRAINING.md").write_text(text, encoding="utf-8")


def write_scores(out: Path, count: int = PER_KIND) -> None:
    """Measures the weights in ``out`` and writes the second part of the report."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    table = score_table(score_kinds(model, tokenizer, count))
    parameters = sum(p.numel() for p in model.parameters())
    report = out / "TRAINING.md"
    before = report.read_text(encoding="utf-8").partition(_SCORE)[0]
    report.write_text(before + _SCORES.format(heading=_SCORE, table=table, parameters=parameters), encoding="utf-8")


if __name__ == "__main__":
    write_scores(trained_directory(SHAPES["tiny-tools"]))
