"""How well a model does on the held-out split: exact answers and perplexity, on anything that scores token ids.

:func:`perplexity` and the text it is measured on take any engine; :func:`score_tasks` drives a transformers model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trtx.checkpoint.tasks import TASKS, Sample, samples
from trtx.checkpoint.text import sentences

HELD_OUT_SEED = 1_000_003  # text has no split by content, so its seed is one that training never uses
# Log-probabilities (natural) of ids[1:], each given all ids before it.
TokenLogprobs = Callable[[Sequence[int]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Score:
    """Share of exact answers (0 to 1) and perplexity of the answers' tokens, without and with the chat template."""

    task: str
    plain: float
    chat: float
    plain_perplexity: float
    chat_perplexity: float


def held_out_samples(task: str, count: int, seed: int = 0) -> list[Sample]:
    """``count`` held-out samples, the same for the same seed."""
    return list(itertools.islice(samples(task, "held-out", seed), count))


def held_out_texts(count: int) -> list[str]:
    """``count`` short texts like those trained on, never trained on."""
    return list(sentences(HELD_OUT_SEED, count))


def perplexity(pieces: Iterable[tuple[Sequence[int], int]], token_logprobs: TokenLogprobs) -> float:
    """``exp`` of the mean negative log-probability over every piece's ids from position ``first`` (at least 1) on.

    ``pieces``: ``(ids, first)``; ids before ``first`` are context.
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
    """Prompt and answer as one row of ids, and where the answer starts."""
    pieces = []
    for prompt, answer in pairs:
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        pieces.append((prompt_ids + tokenizer.encode(answer, add_special_tokens=False), len(prompt_ids)))
    return pieces


def score_tasks(model: Any, tokenizer: Any, per_task: int) -> list[Score]:
    """Every task on ``per_task`` held-out samples. An answer is exact when greedy decoding yields all its ids.

    Greedy decoding yields exactly the answer if and only if each of its ids is the most likely one given the prompt
    and the ids before it, so one forward pass a sample tells.
    """
    scores = []
    for task in TASKS:
        chosen = held_out_samples(task, per_task)
        forms = [[s.plain() for s in chosen], [s.chat() for s in chosen]]
        exact, perplexities = [], []
        for form in forms:
            pieces = answer_pieces(tokenizer, form)
            exact.append(sum(_is_greedy(model, ids, first) for ids, first in pieces) / len(pieces))
            perplexities.append(perplexity(pieces, transformers_logprobs(model)))
        scores.append(Score(task, *exact, *perplexities))
    return scores


def score_text(model: Any, tokenizer: Any, count: int) -> float:
    """Perplexity of held-out generated text."""
    pieces = [(tokenizer.encode(text, add_special_tokens=False), 1) for text in held_out_texts(count)]
    return perplexity(pieces, transformers_logprobs(model))


def transformers_logprobs(model: Any) -> TokenLogprobs:
    """A scorer over a transformers causal model, in the model's own dtype and device."""

    def scorer(ids: Sequence[int]) -> list[float]:
        logits = _logits(model, ids)[:-1].float()
        chosen = logits.log_softmax(-1).gather(1, logits.new_tensor(ids[1:]).long()[:, None])
        values: list[float] = chosen[:, 0].tolist()
        return values

    return scorer


def _is_greedy(model: Any, ids: Sequence[int], first: int) -> bool:
    best: list[int] = _logits(model, ids)[first - 1 : -1].argmax(-1).tolist()
    return best == list(ids[first:])


def _logits(model: Any, ids: Sequence[int]) -> Any:
    import torch

    with torch.inference_mode():
        return model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False).logits[0]
