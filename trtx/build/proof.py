"""Compares a build with its source: perplexity and greedy continuations on held-out text, and the perplexity gate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.checkpoint.held_out import held_out_passages, held_out_prompts
from trtx.errors import UnsupportedModel
from trtx.text import load_tokenizer
from trtx.torch_engine.llmapi import OfflineEngine

TEXTS = 400
"""The number of texts: about 35,000 tokens for synthetic:tiny-trained, enough to distinguish the losses of two 8-bit
formats."""
PROMPTS, MAX_NEW_TOKENS = 192, 32


@dataclass(frozen=True, slots=True)
class Proof:
    """The comparison of a build with its source, both run by the embedded engine on the same device.

    ``perplexity``: exp of the mean negative log-probability over all tokens of the held-out texts, except the first of
    each text. ``increase_pct``: the increase of the build's perplexity over the source's, in per cent.
    ``standard_error_pct``: the standard error of that increase, from the paired differences of each token, which cancel
    the variance of the text itself.
    ``greedy_agreement``: of up to ``MAX_NEW_TOKENS`` greedy tokens after each prompt, those before the first difference
    between the two models, as a share over all prompts. After a difference the two models continue different texts, so
    later tokens don't count. ``identical``: the number of prompts with completely equal continuations.
    """

    tokens: int
    source_perplexity: float
    perplexity: float
    increase_pct: float
    standard_error_pct: float
    prompts: int
    greedy_agreement: float
    identical: int


@dataclass(frozen=True, slots=True)
class Answers:
    """The results of one model.

    ``logprobs``: the natural log-probability of every scored token. ``continuations``: the ids after each prompt.
    """

    logprobs: list[float]
    continuations: list[list[int]]


def prove(source: Path, result: Path, *, kv_dtype: str, on_step: Callable[[int, int], None]) -> Proof:
    """Runs ``source``, then ``result`` with ``kv_dtype``, each in its own engine process, and compares them.

    Raises UsageError for a checkpoint that the embedded engine can't load, UnsupportedModel if its context is shorter
    than the texts, and LaunchError if an engine process dies.
    """
    tokenizer = load_tokenizer(source)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    texts = [encode(text) for text in held_out_passages(TEXTS)]
    prompts = held_out_prompts(encode, PROMPTS)
    each = len(texts) + len(prompts)
    before = ask(source, texts, prompts, kv_dtype="auto", on_answer=lambda done: on_step(done, 2 * each))
    after = ask(result, texts, prompts, kv_dtype=kv_dtype, on_answer=lambda done: on_step(each + done, 2 * each))
    return compare(before, after)


def ask(
    model: Path,
    texts: Sequence[list[int]],
    prompts: Sequence[list[int]],
    *,
    kv_dtype: str,
    on_answer: Callable[[int], None],
) -> Answers:
    """Scores ``texts`` and continues ``prompts`` with one model; both are token ids."""
    with OfflineEngine(model, purpose="proves the build", kv_dtype=kv_dtype) as engine:
        longest = max(MAX_NEW_TOKENS + max(map(len, prompts)), 1 + max(map(len, texts)))
        if longest > engine.max_seq_len:
            raise UnsupportedModel(
                f"{model}: its context of {engine.max_seq_len} tokens is shorter than the {longest} that the texts of "
                "the proof take; it can be served, and compared with trtx eval"
            )
        scored, continued = engine.prompt_logprobs(texts, 0), engine.continuations(prompts, MAX_NEW_TOKENS)
        logprobs: list[float] = []
        continuations: list[list[int]] = []
        for done, (ids, rows) in enumerate(zip(texts, scored, strict=True), start=1):
            logprobs += [row[token] for token, row in zip(ids[1:], rows, strict=True)]
            on_answer(done)
        for done, ids in enumerate(continued, start=len(texts) + 1):
            continuations.append(ids)
            on_answer(done)
    return Answers(logprobs, continuations)


def compare(source: Answers, result: Answers) -> Proof:
    """Compares the results of both models, which must come from the same texts and prompts."""
    losses = [before - after for before, after in zip(source.logprobs, result.logprobs, strict=True)]
    mean_loss = statistics.fmean(losses)
    pairs = list(zip(source.continuations, result.continuations, strict=True))
    agreed = sum(_common_prefix(before, after) for before, after in pairs)
    return Proof(
        tokens=len(losses),
        source_perplexity=math.exp(-statistics.fmean(source.logprobs)),
        perplexity=math.exp(-statistics.fmean(result.logprobs)),
        increase_pct=100 * math.expm1(mean_loss),
        standard_error_pct=100 * math.exp(mean_loss) * statistics.stdev(losses) / math.sqrt(len(losses)),
        prompts=len(pairs),
        greedy_agreement=agreed / max(1, sum(max(len(before), len(after)) for before, after in pairs)),
        identical=sum(before == after for before, after in pairs),
    )


def judge(proof: Proof | None, max_increase_pct: float | None) -> dict[str, Any] | None:
    """Returns whether the build's perplexity is within the limit, as the manifest records it; None without a limit."""
    if max_increase_pct is None or proof is None:
        return None
    return {"max_ppl_increase_pct": max_increase_pct, "passed": proof.increase_pct <= max_increase_pct}


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
