"""Whether a build still says what its source says: perplexity and greedy continuations of both, on held-out text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtx.checkpoint.held_out import held_out_passages, held_out_prompts
from trtx.checkpoint.model_config import read_model_config
from trtx.checkpoint.windows import computed_windows
from trtx.errors import UnsupportedModel
from trtx.text import load_tokenizer
from trtx.torch_engine.llmapi import OfflineEngine

TEXTS = 400
"""Some 35,000 tokens of synthetic:tiny-trained's: enough that what two 8-bit formats cost can be told apart."""
PROMPTS, MAX_NEW_TOKENS = 192, 32


@dataclass(frozen=True, slots=True)
class Proof:
    """A build against its source, both run by the embedded engine on the same device.

    ``perplexity``: exp of the mean negative log-probability of every token of the held-out texts but each text's
    first. ``increase_pct``: of the result's over the source's, in per cent; ``standard_error_pct``: of that figure,
    from the differences token by token, which share the text's own chance.
    ``greedy_agreement``: of up to ``MAX_NEW_TOKENS`` tokens that follow a prompt greedily, those that both models give
    before the first one in which they differ; summed over the prompts, as a share of all. After a difference the two
    answer different texts, so nothing later counts. ``identical``: prompts whose continuations are the same to the end.
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
    """What one model says. ``logprobs``: natural, of every scored token. ``continuations``: ids after each prompt."""

    logprobs: list[float]
    continuations: list[list[int]]


def check_supported(source: Path, *, on_gpu: bool) -> None:
    """Raises UnsupportedModel where the embedded engine does not run such a model, before a process is started for it:
    what that raises is a UsageError whatever it was. Raises UsageError for a config.json that says nothing sound."""
    config = read_model_config(source)
    computed_windows(config.windows, source, on_gpu=on_gpu, deterministic=False, max_seq_len=None)


def prove(source: Path, result: Path, *, kv_dtype: str, on_step: Callable[[int, int], None]) -> Proof:
    """Runs ``source``, then ``result`` with ``kv_dtype``, each in an engine process of its own.

    Raises UsageError for a checkpoint that the embedded engine can't load, UnsupportedModel where its context is
    shorter than the texts, LaunchError for an engine that dies.
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
    """Scores ``texts`` and continues ``prompts``, both token ids."""
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
    """Both from the same texts and prompts."""
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


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
