"""From logits to tokens, for the rows that need more than an argmax."""

from __future__ import annotations

import torch
from torch import Tensor

from trtx.torch_engine.batch import Logprob, Sampled, ScheduledSequence
from trtx.torch_engine.runner.kernels import int32
from trtx.torch_engine.runner.sampling_plan import SamplingPlan, resolve_sampling

_ROWS_AT_ONCE = 64  # of the vocabulary in float64: 64 rows of 151,936 are 78 MB


class Sampler:
    """Temperature, top-k, top-p, min-p, penalties, ``min_tokens`` and logprobs.

    A sampled token is a function of its row's logits, its request's seed and how many tokens the request has:
    one uniform number per token, looked up in the cumulative distribution in vocabulary order. So it depends
    neither on the batch nor on preemption or handoff, and a last-bit difference of logits moves it only if the
    number lies that close to a token's edge.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._plans: list[SamplingPlan | None] = [None] * max_batch_size

    def plan(self, sequence: ScheduledSequence) -> SamplingPlan:
        """The resolved sampling of the sequence in this slot; resolved again when another sequence takes it."""
        plan = None if sequence.is_first else self._plans[sequence.slot]
        if plan is None:
            plan = self._plans[sequence.slot] = resolve_sampling(sequence.sampling)
        return plan

    def sample(self, logits: Tensor, greedy: Tensor, sequences: list[ScheduledSequence]) -> list[Sampled]:
        """``logits`` [rows, vocab] of the model, ``greedy`` [rows] their argmax; row i is ``sequences[i]``'s.

        Waits for the device. Logprobs are those of the model's own distribution, before any of the above.
        """
        plans = [self.plan(sequence) for sequence in sequences]
        special = [
            row
            for row, (plan, sequence) in enumerate(zip(plans, sequences, strict=True))
            if not plan.is_plain or plan.bans_stops(sequence)
        ]
        tokens = greedy
        if special:
            tokens = greedy.clone()
            for begin in range(0, len(special), _ROWS_AT_ONCE):
                rows = special[begin : begin + _ROWS_AT_ONCE]
                index = int32(rows, logits.device).long()
                tokens[index] = _choose(logits[index].float(), [sequences[r] for r in rows], [plans[r] for r in rows])
        results = [Sampled(token) for token in tokens.tolist()]
        asked = [(row, plan.logprobs) for row, plan in enumerate(plans) if plan.logprobs is not None]
        for begin in range(0, len(asked), _ROWS_AT_ONCE):
            part = asked[begin : begin + _ROWS_AT_ONCE]
            index = int32([row for row, _ in part], logits.device).long()
            entries = rank_logprobs(logits[index], tokens[index], [count for _, count in part])
            for (row, _), entry in zip(part, entries, strict=True):
                results[row].logprobs = entry
        return results


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


def _choose(logits: Tensor, sequences: list[ScheduledSequence], plans: list[SamplingPlan]) -> Tensor:
    """``[rows]`` tokens from a float32 copy of the rows' logits, which it changes."""
    device = logits.device
    if any(plan.has_penalties for plan in plans):
        _penalize(logits, sequences, plans)
    for row, (sequence, plan) in enumerate(zip(sequences, plans, strict=True)):
        if plan.bans_stops(sequence):
            banned = [token for token in sequence.allowed_stop_ids if token < logits.shape[1]]
            logits[row, banned] = -torch.inf
    best = logits.argmax(dim=-1)
    if all(plan.is_greedy for plan in plans):
        return best
    temperatures = torch.tensor([1.0 if p.is_greedy else p.temperature for p in plans], device=device)
    # In float64 the cumulative sum of 150,000 probabilities keeps each token's edge to 1e-16.
    probabilities = torch.softmax(logits.double() / temperatures.unsqueeze(1), dim=-1)
    probabilities = _restrict(probabilities, logits, plans)
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    numbers = [uniform(s.seed, len(s.output_token_ids)) for s in sequences]
    wanted = torch.tensor(numbers, dtype=torch.float64, device=device).unsqueeze(1) * total
    wanted = torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total)))  # rounding must not reach the end
    sampled = torch.searchsorted(cumulative, wanted, right=True).squeeze(1)
    is_greedy = torch.tensor([plan.is_greedy for plan in plans], device=device)
    return torch.where(is_greedy, best, sampled)


def _restrict(probabilities: Tensor, logits: Tensor, plans: list[SamplingPlan]) -> Tensor:
    """Zeroes what top-k, then top-p over what is left, then min-p exclude. Does not renormalise.

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
        ordered = ordered.masked_fill((before >= top_p * ordered.sum(-1, keepdim=True)) & (top_p < 1.0), 0.0)
        probabilities = torch.zeros_like(probabilities).scatter_(1, order, ordered)
    if any(plan.min_p for plan in plans):
        min_p = torch.tensor([plan.min_p for plan in plans], dtype=torch.float64, device=device).unsqueeze(1)
        floor = min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
    return probabilities


def _penalize(logits: Tensor, sequences: list[ScheduledSequence], plans: list[SamplingPlan]) -> None:
    """In place on ``[rows, vocab]``. As in TensorRT-LLM, every penalty counts the prompt as well as the output."""
    rows, vocab = logits.shape
    seen: list[int] = []
    owners: list[int] = []
    for row, (sequence, plan) in enumerate(zip(sequences, plans, strict=True)):
        if plan.has_penalties:
            seen += sequence.prompt_token_ids
            seen += sequence.output_token_ids
            owners += [row] * (len(sequence.prompt_token_ids) + len(sequence.output_token_ids))
    cells = int32(owners, logits.device).long() * vocab + int32(seen, logits.device)
    counts = torch.bincount(cells, minlength=rows * vocab).view(rows, vocab)

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device).unsqueeze(1)

    repetition = column([plan.repetition_penalty for plan in plans])
    changed = torch.where(logits > 0, logits / repetition, logits * repetition)
    changed -= column([plan.presence_penalty for plan in plans])
    changed -= column([plan.frequency_penalty for plan in plans]) * counts
    logits.copy_(torch.where(counts > 0, changed, logits))
