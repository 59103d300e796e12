"""From logits to tokens, for the rows that need more than an argmax."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from trtx.torch_engine.batch import Logprob, Sampled, ScheduledSequence
from trtx.torch_engine.runner.kernels import int32
from trtx.torch_engine.sampling_plan import SamplingPlan

logger = logging.getLogger(__name__)

NO_TOKEN = -1
"""In place of a row's token where none is best: a logit is NaN or infinite, or every token is excluded. It comes to
the host with the tokens, so that looking for it costs no transfer of its own."""
_NO_NUMBERS = (
    "the model's logits for this request are not numbers (NaN or infinite), or exclude every token, after {tokens} "
    "tokens: none can be sampled; if other prompts fail too, look at the checkpoint, its dtype and its quantization"
)
_ROWS_AT_ONCE = 64  # of the vocabulary in float64: 64 rows of 151,936 are 78 MB


def best_tokens(logits: Tensor) -> Tensor:
    """``[rows]`` the likeliest token of each row of ``[rows, vocab]``, ``NO_TOKEN`` where there is none.

    The maximum tells of the whole row: torch takes NaN for the largest. Safe in a CUDA graph: nothing is waited for.
    """
    best = logits.max(dim=-1)
    # A number less itself is 0, infinity and NaN less themselves are NaN: half of isfinite's kernels.
    return best.indices.masked_fill_((best.values - best.values) != 0, NO_TOKEN)


class Sampler:
    """Temperature, top-k, top-p, min-p, penalties, banned ids and logprobs.

    A sampled token is a function of its row's logits, its request's seed and how many tokens the request has:
    one uniform number per token, looked up in the cumulative distribution in vocabulary order. So it depends
    neither on the batch nor on preemption or handoff, and a last-bit difference of logits moves it only if the
    number lies that close to a token's edge. What is wrong with one row is said in its ``Sampled``, and in no other.
    """

    def __init__(self, max_batch_size: int) -> None:
        # By slot: the ids as the sequence has them, and as the device does.
        self._banned: list[tuple[tuple[int, ...], Tensor] | None] = [None] * max_batch_size

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
            for begin in range(0, len(special), _ROWS_AT_ONCE):
                rows = special[begin : begin + _ROWS_AT_ONCE]
                index = int32(rows, logits.device).long()
                chosen = self._choose(logits[index].float(), [sequences[row] for row in rows])
                tokens[index] = torch.where(greedy[index] == NO_TOKEN, NO_TOKEN, chosen)
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

    def _choose(self, logits: Tensor, sequences: list[ScheduledSequence]) -> Tensor:
        """``[rows]`` tokens, or ``NO_TOKEN``, from a float32 copy of the rows' logits, which it changes."""
        device, plans = logits.device, [sequence.sampling for sequence in sequences]
        if any(plan.has_penalties for plan in plans):
            _penalize(logits, sequences)
        for row, sequence in enumerate(sequences):
            if sequence.banned_ids:
                logits[row].index_fill_(0, self._banned_ids(sequence, device), -torch.inf)
        best = best_tokens(logits)
        if all(plan.is_greedy for plan in plans):
            return best
        temperatures = torch.tensor(
            [1.0 if p.is_greedy else p.temperature for p in plans], dtype=torch.float64, device=device
        ).unsqueeze(1)
        # In float64 the cumulative sum of 150,000 probabilities keeps each token's edge to 1e-16. Counted from the
        # best, a logit over the smallest temperature is minus infinity at most: that is greedy in the limit.
        scaled = logits.double()
        scaled -= scaled.amax(dim=-1, keepdim=True)
        scaled /= temperatures
        probabilities = _restrict(torch.softmax(scaled, dim=-1), logits, plans)
        cumulative = probabilities.cumsum(dim=-1)
        total = cumulative[:, -1:]
        numbers = [uniform(s.seed, len(s.output_token_ids)) for s in sequences]
        wanted = torch.tensor(numbers, dtype=torch.float64, device=device).unsqueeze(1) * total
        wanted = torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))  # not to reach the end
        sampled = torch.searchsorted(cumulative, wanted, right=True).squeeze(1)
        is_greedy = torch.tensor([plan.is_greedy for plan in plans], device=device)
        return torch.where(is_greedy | (best == NO_TOKEN), best, sampled)

    def _banned_ids(self, sequence: ScheduledSequence, device: torch.device) -> Tensor:
        """Uploaded once a sequence, whose ids are the same object from step to step."""
        banned = self._banned[sequence.slot]
        if banned is None or banned[0] is not sequence.banned_ids:
            banned = (sequence.banned_ids, int32(list(sequence.banned_ids), device).long())
            self._banned[sequence.slot] = banned
        return banned[1]


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


def uniform(seed: int, index: int) -> float:
    """The ``index``-th number of ``seed``'s stream, in [0, 1): splitmix64's mixer over both, top 53 bits.

    Constants: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    return (_mix(_mix(seed) + index * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


def _restrict(probabilities: Tensor, logits: Tensor, plans: list[SamplingPlan]) -> Tensor:
    """Zeroes what top-k, then top-p over what is left, then min-p exclude: never the likeliest. Does not renormalise.

    The order is that of the float32 ``logits``, which sort twice as fast; equal ones in vocabulary order.
    """
    device, vocab = probabilities.device, probabilities.shape[1]
    if any(plan.top_k or plan.top_p < 1.0 for plan in plans):
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        ordered = probabilities.gather(1, order)
        top_k = torch.tensor([plan.top_k or vocab for plan in plans], device=device).unsqueeze(1)
        ordered = ordered.masked_fill(torch.arange(vocab, device=device) >= top_k, 0.0)
        top_p = torch.tensor([plan.top_p for plan in plans], dtype=torch.float64, device=device).unsqueeze(1)
        before = ordered.cumsum(dim=-1) - ordered  # mass of the likelier tokens
        excluded = (before >= top_p * ordered.sum(-1, keepdim=True)) & (top_p < 1.0)
        excluded[:, 0] = False  # the product of two small numbers is 0
        ordered = ordered.masked_fill(excluded, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter_(1, order, ordered)
    if any(plan.min_p for plan in plans):
        min_p = torch.tensor([plan.min_p for plan in plans], dtype=torch.float64, device=device).unsqueeze(1)
        floor = min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
    return probabilities


def _penalize(logits: Tensor, sequences: list[ScheduledSequence]) -> None:
    """In place on ``[rows, vocab]``. As in TensorRT-LLM, every penalty counts the prompt as well as the output.

    Only logits of tokens that were there change. They are computed in float64, where no penalty of a plan overflows,
    and clamped to the finite float32, as TensorRT-LLM clamps them; those that are not finite stay as they are.
    """
    rows, vocab = logits.shape
    device = logits.device
    seen: list[int] = []
    owners: list[int] = []
    for row, sequence in enumerate(sequences):
        if sequence.sampling.has_penalties:
            seen += sequence.prompt_token_ids
            seen += sequence.output_token_ids
            owners += [row] * (len(sequence.prompt_token_ids) + len(sequence.output_token_ids))
    owner, token = int32(owners + seen, device).long().view(2, -1)
    cells = owner * vocab + token  # one of each token that was there, repeated: all get the same value
    counts = torch.zeros(rows * vocab, dtype=torch.int32, device=device)
    counts.index_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))
    plans = [sequence.sampling for sequence in sequences]
    repetition, presence, frequency = torch.tensor(
        [
            [plan.repetition_penalty for plan in plans],
            [plan.presence_penalty for plan in plans],
            [plan.frequency_penalty for plan in plans],
        ],
        dtype=torch.float64,
        device=device,
    )[:, owner]
    flat = logits.view(-1)
    before = flat[cells].double()
    changed = torch.where(before > 0, before / repetition, before * repetition)
    changed -= presence + frequency * counts[cells]
    largest = torch.finfo(torch.float32).max
    changed = torch.where(before.isfinite(), changed.clamp_(-largest, largest), before)
    flat[cells] = changed.float()
