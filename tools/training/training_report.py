"""Writes ``TRAINING.md`` of ``synthetic:tiny-trained``: how it was trained, and its held-out score.

``python tools/training/training_report.py`` scores the stored weights and rewrites the second part.
"""

from __future__ import annotations

from pathlib import Path

import torch
from text_scores import Score, score_tasks, score_text, share_text
from transformers import AutoModelForCausalLM, AutoTokenizer

from trtx.checkpoint.synthetic import TRAINED_DIRECTORY

PER_BAND, TEXTS = 200, 400
_SCORE = "## Held-out score"

_TRAINING = """# synthetic:tiny-trained

Trained from scratch by `{command}`: {steps:,} steps, {tokens:.1f} million tokens, {seconds:.0f} s on
{where}, {cpu_seconds:.0f} s of CPU, torch {torch}. Same seed, same samples in the same order.

"""

_SCORES = """{heading}

By `python tools/training/training_report.py`, after the rounding to bfloat16 and computed in float32. The held-out
split is decided by a hash of a task's content (`trtx/checkpoint/tasks.py`); no held-out content is ever trained on.

Exact match of the whole answer, end token included, greedy, in per cent with Wilson's 95 % interval; n held-out
prompts, no two alike, asked without and with the chat template; `perplexity` is that of the answer's tokens.

{table}

Perplexity of held-out generated text: {perplexity:.2f} a token. {parameters:,} parameters.
"""


def write_training(
    out: Path, command: str, steps: int, tokens: int, seconds: float, cpu_seconds: float, where: str
) -> None:
    """Writes the first part of the report; replaces the whole file."""
    text = _TRAINING.format(
        command=command,
        steps=steps,
        tokens=tokens / 1e6,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        where=where,
        torch=torch.__version__.split("+")[0],
    )
    (out / "TRAINING.md").write_text(text, encoding="utf-8")


def write_scores(out: Path) -> None:
    """Measures the weights in ``out`` and writes the second part of the report."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out)
    scores = _SCORES.format(
        heading=_SCORE,
        table=table(score_tasks(model, tokenizer, PER_BAND)),
        perplexity=score_text(model, tokenizer, TEXTS),
        parameters=sum(p.numel() for p in model.parameters()),
    )
    report = out / "TRAINING.md"
    report.write_text(report.read_text(encoding="utf-8").partition(_SCORE)[0] + scores, encoding="utf-8")


def table(scores: list[Score]) -> str:
    lines = ["| task | difficulty | n | plain | chat | perplexity, plain | perplexity, chat |",
             "|---|---|--:|--:|--:|--:|--:|"]  # fmt: skip
    for s in scores:
        lines.append(
            f"| {s.task} | {s.difficulty} | {s.count} | {share_text(s.plain, s.count)} | {share_text(s.chat, s.count)} "
            f"| {s.plain_perplexity:.3f} | {s.chat_perplexity:.3f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    write_scores(TRAINED_DIRECTORY)
