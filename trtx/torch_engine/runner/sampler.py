"""From logits to tokens, for the rows that need more than an argmax."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trtx.torch_engine.batch import Logprob, Sampled, ScheduledSequence
from trtx.torch_engine.runner.kernels import int32
from trtx.torch_engine.runner.sampling_rows import SamplingRows
from trtx.torch_engine.runner.torch_sampling import NO_TOKEN, replace_tokens

if TYPE_CHECKING:
    from trtx.torch_engine.runner.triton_sampling import TritonSampling

logger = logging.getLogger(__name__)

_NO_NUMBERS = (
    "the model's logits for this request are not numbers (NaN or infinite), or exclude every token, after {tokens} "
    "tokens: none can be sampled; if other prompts fail too, look at the checkpoint, its dtype and its quantization"
)
_ROWS_AT_ONCE = 64  # of the vocabulary in int64: 64 rows of 151,936 are 78 MB


def best_tokens(logits: Tensor) -> Tensor:
    """``[rows]`` the likeliest token of each row of ``[rows, vocab]``, ``NO_TOKEN`` where there is none.

    The maximum tells of the whole row: torch takes NaN for the largest. Safe in a CUDA graph: nothing is waited for.
    """
    best = logits.max(dim=-1)
    # A number less itself is 0, infinity and NaN less themselves are NaN: half of isfinite's kernels.
    return best.indices.masked_fill_((best.values - best.values) != 0, NO_TOKEN)


class Sampler:
    """Temperature, top-k, top-p, min-p, penalties, banned ids and logprobs, as :mod:`torch_sampling` defines them.

    A sampled token is a function of its row's logits, its request's seed and how many tokens the request has: it
    depends neither on the batch nor on preemption or handoff, and on the device only through the logits. What is wrong
    with one row is said in its ``Sampled``, and in no other.

    On CUDA the kernels follow the pass on its stream, enqueued while it runs; they are no part of its graph, so that a
    batch of greedy rows launches none of them.
    """

    def __init__(self, max_batch_size: int, vocab_size: int, device: torch.device) -> None:
        self._rows = SamplingRows(max_batch_size, vocab_size, device)
        self._kernels: TritonSampling | None = None
        if device.type == "cuda":
            from trtx.torch_engine.runner.triton_sampling import TritonSampling

            self._kernels = TritonSampling(max_batch_size, vocab_size, device)

    def sample(self, logits: Tensor, greedy: Tensor, sequences: list[ScheduledSequence]) -> list[Sampled]:
        """``logits`` [rows, vocab] of the model, ``greedy`` [rows] their ``best_tokens``; row i is ``sequences[i]``'s.

        Waits for the device. Logprobs are those of the model's own distribution, before any of the above.
        """
        try:
            return self._sample(logits, greedy, sequences)
        except Exception as error:
            if is_device_error(error):
                raise
            logger.exception("%d rows could not be sampled together; they are sampled one by one", len(sequences))
        return [
            self._sample_alone(logits[row : row + 1], greedy[row : row + 1], one) for row, one in enumerate(sequences)
        ]

    def _sample_alone(self, logits: Tensor, greedy: Tensor, sequence: ScheduledSequence) -> Sampled:
        try:
            return self._sample(logits, greedy, [sequence])[0]
        except Exception as error:
            if is_device_error(error):
                raise
            return Sampled(None, error=f"no token could be sampled: {type(error).__name__}: {str(error)[:500]}")

    def _sample(self, logits: Tensor, greedy: Tensor, sequences: list[ScheduledSequence]) -> list[Sampled]:
        special = [row for row, s in enumerate(sequences) if not s.sampling.is_plain or s.banned_ids]
        tokens = greedy
        if special:
            tokens = greedy.clone()
            if self._kernels is None:
                self._replace_on_cpu(tokens, logits, sequences, [row for row in special if greedy[row] != NO_TOKEN])
            else:
                self._replace_on_device(self._kernels, tokens, logits, sequences)
        results = [
            Sampled(token) if token != NO_TOKEN else _without_numbers(sequence)
            for token, sequence in zip(tokens.tolist(), sequences, strict=True)
        ]
        asked = [
            (row, s.sampling.logprobs)
            for row, s in enumerate(sequences)
            if s.sampling.logprobs is not None and results[row].error is None
        ]
        for begin in range(0, len(asked), _ROWS_AT_ONCE):
            part = asked[begin : begin + _ROWS_AT_ONCE]
            index = int32([row for row, _ in part], logits.device).long()
            entries = rank_logprobs(logits[index], tokens[index], [count for _, count in part])
            for (row, _), entry in zip(part, entries, strict=True):
                results[row].logprobs = entry
        return results

    def _replace_on_cpu(
        self, tokens: Tensor, logits: Tensor, sequences: list[ScheduledSequence], special: list[int]
    ) -> None:
        for begin in range(0, len(special), _ROWS_AT_ONCE):
            part = special[begin : begin + _ROWS_AT_ONCE]
            rows, edits = zip(*(self._rows.update(sequences[row]) for row in part), strict=True)
            indices = [len(sequences[row].output_token_ids) for row in part]
            chosen = torch.empty(len(part), dtype=tokens.dtype)
            replace_tokens(chosen, logits[part].float(), rows, edits, indices)
            tokens[part] = chosen

    def _replace_on_device(
        self, kernels: TritonSampling, tokens: Tensor, logits: Tensor, sequences: list[ScheduledSequence]
    ) -> None:
        has_edits = is_sampled = is_restricted = False
        for sequence in sequences:
            if sequence.sampling.is_plain and not sequence.banned_ids:
                self._rows.forget(sequence.slot)
                continue
            row, edits = self._rows.update(sequence)
            has_edits |= edits is not None
            is_sampled |= row.is_sampled
            is_restricted |= row.is_restricted
        self._rows.upload()
        slots = [sequence.slot for sequence in sequences]
        indices = [len(sequence.output_token_ids) for sequence in sequences]
        uploaded = int32(slots + indices, logits.device).view(2, -1)
        kernels.replace_tokens(
            tokens, logits, uploaded[0], uploaded[1], self._rows.on_device,
            has_edits=has_edits, is_sampled=is_sampled, is_restricted=is_restricted,
        )  # fmt: skip


def is_device_error(error: Exception) -> bool:
    """Whether the device may be in an unknown state after it: no request's fault, and nothing to go on with."""
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def _without_numbers(sequence: ScheduledSequence) -> Sampled:
    known = len(sequence.prompt_token_ids) + len(sequence.output_token_ids)
    return Sampled(None, error=_NO_NUMBERS.format(tokens=known))


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
