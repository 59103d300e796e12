"""Scores a model on the held-out tasks and texts: exact answers and perplexity.

:func:`perplexity` works with any engine that scores token ids; :func:`score_tasks` runs a transformers model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from trtx.checkpoint.held_out import held_out_samples, held_out_texts
from trtx.checkpoint.tasks import TrainingSample
from trtx.stats.proportions import wilson_interval

# Maps ids to the natural log-probabilities of ids[1:], each given all previous ids.
TokenLogprobs = Callable[[Sequence[int]], Sequence[float]]
# For each task, the unit of its difficulty and the bands (from, to) of the scores.
DIFFICULTIES: MappingProxyType[str, tuple[str, tuple[tuple[int, int], ...]]] = MappingProxyType(
    {
        "addition-1": ("digits", ((1, 1),)),
        "addition-2": ("digits", ((1, 2),)),
        "subtraction": ("digits", ((1, 1), (2, 2))),
        "copying": ("words", ((2, 4), (5, 8), (9, 12))),
        "look-up": ("entries", ((2, 4), (5, 7), (8, 10))),
        "json": ("fields", ((2, 2), (3, 3))),
    }
)
_BATCH = 50


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one band of one task, without and with the chat template.

    ``plain`` and ``chat``: the number of exact answers to the same ``count`` samples in both forms. The perplexities
    are over the tokens of the answers.
    """

    task: str
    difficulty: str
    count: int
    plain: int
    chat: int
    plain_perplexity: float
    chat_perplexity: float


def size(sample: TrainingSample) -> int:
    """Returns the difficulty of a sample, in the unit that ``DIFFICULTIES`` names."""
    unit = DIFFICULTIES[sample.task][0]
    if unit == "digits":
        return max(len(term) for term in sample.key.replace("+", "-").split("-"))
    return len(sample.key.split()) if unit == "words" else len(sample.key.split(", "))


def perplexity(pieces: Iterable[tuple[Sequence[int], int]], token_logprobs: TokenLogprobs) -> float:
    """Returns exp of the mean negative log-probability of the scored tokens.

    ``pieces``: pairs ``(ids, first)``. The ids from position ``first`` (at least 1) on are scored; those before it are
    context. Raises ValueError if there is no token to score.
    """
    total, counted = 0.0, 0
    for ids, first in pieces:
        scored = token_logprobs(ids)[first - 1 :]
        total -= math.fsum(scored)
        counted += len(scored)
    if not counted:
        raise ValueError("no token to score")
    return math.exp(total / counted)


def answer_pieces(tokenizer: Any, pairs: Iterable[tuple[str, str]]) -> list[tuple[list[int], int]]:
    """Returns each prompt with its answer as one list of ids, and the position of the answer."""
    pieces = []
    for prompt, answer in pairs:
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        pieces.append((prompt_ids + tokenizer.encode(answer, add_special_tokens=False), len(prompt_ids)))
    return pieces


def score_tasks(model: Any, tokenizer: Any, per_band: int) -> list[Score]:
    """Scores every band of every task on up to ``per_band`` held-out samples with distinct prompts.

    Greedy decoding gives exactly the answer if and only if each of its ids is the most likely one given the prompt and
    the previous ids, so one forward per sample suffices.
    """
    scores = []
    for task, (unit, bands) in DIFFICULTIES.items():
        for low, high in bands:
            drawn = (sample for sample in held_out_samples(task, 40 * per_band) if low <= size(sample) <= high)
            chosen = list({sample.prompt: sample for sample in drawn}.values())[:per_band]
            exact, perplexities = [], []
            for form in ([s.plain() for s in chosen], [s.chat() for s in chosen]):
                answers = _answers(model, answer_pieces(tokenizer, form))
                exact.append(sum(right for right, _ in answers))
                logprobs = [logprob for _, row in answers for logprob in row]
                perplexities.append(math.exp(-math.fsum(logprobs) / len(logprobs)))
            difficulty = f"{low} {unit}" if low == high else f"{low} to {high} {unit}"
            scores.append(Score(task, difficulty.replace("1 digits", "1 digit"), len(chosen), *exact, *perplexities))
    return scores


def share_text(right: int, count: int) -> str:
    """Formats a share in per cent with its Wilson interval, such as "98.0 (95.0 to 99.2)"."""
    low, high = wilson_interval(right, count)
    return f"{100 * right / count:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def score_text(model: Any, tokenizer: Any, count: int) -> float:
    """Returns the perplexity of a model on held-out generated text."""
    pieces = [(tokenizer.encode(text, add_special_tokens=False), 1) for text in held_out_texts(count)]
    return perplexity(pieces, transformers_logprobs(model))


def transformers_logprobs(model: Any) -> TokenLogprobs:
    """Returns a scorer that runs a transformers causal model in its own dtype and on its own device."""

    def scorer(ids: Sequence[int]) -> list[float]:
        logits = _logits(model, ids)[:-1].float()
        chosen = logits.log_softmax(-1).gather(1, logits.new_tensor(ids[1:]).long()[:, None])
        values: list[float] = chosen[:, 0].tolist()
        return values

    return scorer


def _answers(model: Any, pieces: Sequence[tuple[list[int], int]]) -> list[tuple[bool, list[float]]]:
    """Returns for each piece whether greedy decoding gives its answer, and the log-probabilities of the answer."""
    found: list[tuple[bool, list[float]]] = []
    for batch in (pieces[at : at + _BATCH] for at in range(0, len(pieces), _BATCH)):
        width = max(len(ids) for ids, _ in batch)
        rows = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch], device=model.device)
        with torch.inference_mode():  # attention is causal, so padding at the end does not affect earlier positions
            logprobs = model(input_ids=rows, use_cache=False).logits.float().log_softmax(-1)
        for row, (ids, first) in zip(logprobs, batch, strict=True):
            answer, scored = ids[first:], row[first - 1 : len(ids) - 1]
            chosen = scored.gather(1, scored.new_tensor(answer).long()[:, None])[:, 0]
            found.append((scored.argmax(-1).tolist() == answer, chosen.tolist()))
    return found


def _logits(model: Any, ids: Sequence[int]) -> Any:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False).logits[0]
