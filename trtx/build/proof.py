"""Whether a build still says what its source says: perplexity and greedy continuations of both, on held-out text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtx.checkpoint.held_out import held_out_samples, held_out_texts
from trtx.checkpoint.tasks import TASKS
from trtx.errors import LaunchError
from trtx.text import load_tokenizer
from trtx.torch_engine.llmapi import LLM, SamplingParams

TEXTS, SENTENCES_PER_TEXT = 400, 4
"""Some 35,000 tokens of synthetic:tiny-trained's: enough that what two 8-bit formats cost can be told apart."""
PROMPTS_PER_TASK, TEXT_PROMPTS, TEXT_PROMPT_TOKENS, MAX_NEW_TOKENS = 16, 96, 24, 32
"""Answers to tasks that a model masters have no near ties, and hardly a format turns one; text goes on with many."""
_KV_TOKENS = 32_768


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


def prove(source: Path, result: Path, *, kv_dtype: str, on_step: Callable[[int, int], None]) -> Proof:
    """Runs ``source``, then ``result`` with ``kv_dtype``, each in an engine process of its own.

    Raises UsageError for a checkpoint that the embedded engine can't load, LaunchError for an engine that dies.
    """
    tokenizer = load_tokenizer(source)
    sentences = held_out_texts(TEXTS * SENTENCES_PER_TEXT)
    texts = [
        tokenizer.encode("".join(sentences[start : start + SENTENCES_PER_TEXT])).ids
        for start in range(0, len(sentences), SENTENCES_PER_TEXT)
    ]
    prompts = [
        tokenizer.encode(sample.prompt).ids for task in TASKS for sample in held_out_samples(task, PROMPTS_PER_TASK)
    ]
    prompts += [ids[:TEXT_PROMPT_TOKENS] for ids in texts[:TEXT_PROMPTS]]
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
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True)
    answering = SamplingParams(max_tokens=MAX_NEW_TOKENS, detokenize=False)
    try:
        with LLM(
            model,
            max_batch_size=64,
            kv_cache_config={"dtype": kv_dtype, "max_tokens": _KV_TOKENS},
            cuda_graph_config=None,  # seconds to record, and nothing here is timed
        ) as llm:
            running = [llm.generate_async(ids, scoring) for ids in texts]
            running += [llm.generate_async(ids, answering) for ids in prompts]
            outputs: list[Any] = []
            for done, request in enumerate(running, start=1):
                outputs.append(request.result().outputs[0])
                on_answer(done)
    except RuntimeError as error:
        raise LaunchError(f"the engine that proves the build failed on {model}: {error}") from error
    logprobs = [
        row[token].logprob
        for ids, output in zip(texts, outputs, strict=False)
        for token, row in zip(ids[1:], output.prompt_logprobs, strict=False)
    ]
    return Answers(logprobs, [list(output.token_ids) for output in outputs[len(texts) :]])


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
