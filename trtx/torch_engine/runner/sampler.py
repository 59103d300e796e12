"""From logits to tokens: what a step's rows get, and what is said of those that get none."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trtx.torch_engine.batch import Sampled, ScheduledSequence
from trtx.torch_engine.messages import Logprob
from trtx.torch_engine.runner.kernels import int32
from trtx.torch_engine.runner.sampling import definition
from trtx.torch_engine.runner.sampling.definition import NO_TOKEN
from trtx.torch_engine.runner.sampling.slots import SamplingSlots, is_device_error, unexpected
from trtx.torch_engine.sampling_plan import SamplingPlan

if TYPE_CHECKING:
    from trtx.torch_engine.runner.sampling.triton_sampling import TritonSampling

logger = logging.getLogger(__name__)

_NO_NUMBERS = (
    "the model's logits for this request are not numbers (NaN or infinite), or exclude every token, after {tokens} "
    "tokens: none can be sampled; if other prompts fail too, look at the checkpoint, its dtype and its quantization"
)
_ROWS_AT_ONCE = 64  # of the vocabulary in float32: 64 rows of 151,936 are 39 MB


class Sampler:
    """Temperature, top-k, top-p, min-p, penalties, banned ids and logprobs.

    A sampled token is a function of its row's logits, its request's parameters and seed, and how many tokens were
    generated before it: it depends neither on the batch nor on preemption or handoff, and on the device only through
    the logits. :mod:`trtx.torch_engine.runner.sampling.definition` says which; on CUDA, Triton kernels that equal it
    follow the logits in the same graph. What is wrong with one row is said in its ``Sampled``, and in no other.

    A step is :meth:`update`, then :meth:`sample` and :meth:`results` for each of its passes.
    """

    def __init__(self, max_batch_size: int, vocab_size: int, device: torch.device) -> None:
        self._slots = SamplingSlots(max_batch_size, vocab_size, device)
        self._vocab_size = vocab_size
        self._device = device
        self._kernels: TritonSampling | None = None
        if device.type == "cuda":  # Triton is not imported on a CPU, where torch does not bring it
            from trtx.torch_engine.runner.sampling.triton_sampling import TritonSampling

            self._kernels = TritonSampling(self._slots.on_device, vocab_size)

    def update(self, sequences: list[ScheduledSequence]) -> None:
        """Takes in what changed of the slots' sequences since the last step; waits for nothing."""
        self._slots.update(sequences)

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor, out: Tensor | None = None) -> Tensor:
        """``[rows]`` int64 tokens, ``NO_TOKEN`` where there is none, of the model's ``logits`` [rows, vocab].

        ``slots`` and ``positions`` [rows] int32: of the tokens that the logits follow. On CUDA nothing is waited for,
        and a graph may hold it; the padding slot's tokens mean nothing.
        """
        tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device) if out is None else out
        if self._kernels is not None:
            self._kernels.sample(tokens, logits, slots, positions)
            return tokens
        rows = list(zip(slots.tolist(), positions.tolist(), strict=True))

        def choose(part: range) -> None:
            chosen = [rows[at] for at in part]
            tokens[part.start : part.stop] = self._define(logits[part.start : part.stop].float(), chosen)

        def fail(at: int, error: Exception) -> None:
            tokens[at] = NO_TOKEN
            self._slots.set_problem(rows[at][0], error)

        _in_parts(len(rows), choose, fail)
        return tokens

    def _define(self, logits: Tensor, rows: list[tuple[int, int]]) -> Tensor:
        known = [self._slots.rows[slot] for slot, _ in rows]
        edits = [self._slots.edits[slot] for slot, _ in rows]
        indices = [row.index(position) for row, (_, position) in zip(known, rows, strict=True)]
        copy = logits.clone() if any(edit is not None for edit in edits) else logits
        return definition.sample(copy, known, edits, indices)

    def results(self, logits: Tensor, tokens: Tensor, sequences: list[ScheduledSequence]) -> list[Sampled]:
        """Of the rows of a pass: row i is ``sequences[i]``'s. Waits for the device.

        Logprobs are those of the model's own distribution, before any of the above.
        """
        results = [
            Sampled(token) if token != NO_TOKEN else self._without_token(sequence)
            for token, sequence in zip(tokens.tolist(), sequences, strict=True)
        ]
        if self._slots.problems:
            for row, sequence in enumerate(sequences):
                if sequence.slot in self._slots.problems:
                    results[row] = self._without_token(sequence)
        asked = [
            (row, sequence.sampling.logprobs)
            for row, sequence in enumerate(sequences)
            if sequence.sampling.logprobs is not None and results[row].error is None
        ]

        def rank(part: range) -> None:
            rows, counts = zip(*asked[part.start : part.stop], strict=True)
            index = int32(list(rows), logits.device).long()
            for row, entry in zip(rows, rank_logprobs(logits[index], tokens[index], list(counts)), strict=True):
                results[row].logprobs = entry

        def fail(at: int, error: Exception) -> None:
            results[asked[at][0]] = Sampled(None, error=unexpected(error))

        _in_parts(len(asked), rank, fail)
        return results

    def _without_token(self, sequence: ScheduledSequence) -> Sampled:
        known = len(sequence.prompt_token_ids) + len(sequence.output_token_ids)
        return Sampled(None, error=self._slots.problems.get(sequence.slot) or _NO_NUMBERS.format(tokens=known))

    def warm_up(self, dtype: torch.dtype) -> None:
        """On CUDA, compiles and loads all that a request may ask for later, over logits of ``dtype``."""
        plan = SamplingPlan(is_greedy=False, top_k=2, repetition_penalty=1.1, logprobs=1)
        sequence = ScheduledSequence(0, True, [0], 0, [], True, plan, [0], [], 0, banned_ids=(0,))
        self.update([sequence])
        logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self._device)
        at = int32([0], self._device)
        self.results(logits, self.sample(logits, at, at), [sequence])
        sequence.sampling, sequence.banned_ids = SamplingPlan(), ()
        self.update([sequence])


def _in_parts(count: int, run: Callable[[range], None], fail: Callable[[int, Exception], None]) -> None:
    """``run`` over rows ``[0, count)``, many at once; those of a part that raises one by one, ``fail`` for each that
    does again. An error of the device is raised."""
    for begin in range(0, count, _ROWS_AT_ONCE):
        part = range(begin, min(begin + _ROWS_AT_ONCE, count))
        try:
            run(part)
            continue
        except Exception as error:
            if is_device_error(error):
                raise
            logger.exception("%d rows failed together; each is tried alone", len(part))
        for at in part:
            try:
                run(range(at, at + 1))
            except Exception as error:
                if is_device_error(error):
                    raise
                fail(at, error)


def rank_logprobs(logits: Tensor, chosen: Tensor, counts: list[int]) -> list[dict[int, Logprob]]:
    """Per row of ``logits`` [rows, vocab]: the token of ``chosen`` [rows] first, then its ``counts`` likeliest."""
    values = torch.log_softmax(logits.float(), dim=-1)
    picked = values.gather(1, chosen.long().unsqueeze(1))  # [rows, 1]
    ranks = (values > picked).sum(dim=1) + 1
    top = values.topk(min(max(counts), values.shape[1]), dim=1)
    rows = zip(
        chosen.tolist(), picked.squeeze(1).tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist(),
        counts, strict=True,
    )  # fmt: skip
    results = []
    for token, logprob, rank, ids, logprobs, count in rows:
        entry = {token: Logprob(logprob, rank)}
        for place, (other, value) in enumerate(zip(ids[:count], logprobs, strict=False)):
            entry.setdefault(other, Logprob(value, place + 1))
        results.append(entry)
    return results


def prompt_problem(logprobs: list[dict[int, Logprob]]) -> str | None:
    """Why a prompt's logprobs are none. One NaN or infinite logit makes every logprob of its row NaN."""
    for entry in logprobs:
        if any(math.isnan(logprob.logprob) for logprob in entry.values()):
            return "the model's logits for tokens of this prompt are not numbers: prompt_logprobs can't be computed"
    return None
