"""Sampling in plain torch: the CPU's path, and the oracle of the Triton kernels, which give the same tokens.

The definition, a row at a time. A token's *weight* is ``2**40 * 2**((logit - best) * log2(e) / temperature)`` rounded
down to an integer, by additions and multiplications in float32 that round alike everywhere (:func:`weights`). From
there on everything is an integer, so no order of summation can matter. Tokens are ordered by their logit, equal ones
by their id. Top-k keeps the first k of that order; top-p those of them before which there is less than
``top_p * (weight of what top-k kept)``, and always the first; min-p those of them whose weight is at least
``min_p * 2**40``. The token is the first, in vocabulary order, at which the sum of the kept weights exceeds the 64
random bits of (seed, index) times their total, over 2**64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtx.torch_engine.runner.sampling_rows import BANNED, WEIGHT_BITS, SamplingRow, random_bits

NO_TOKEN = -1
"""In place of a row's token where none is best: a logit is NaN or infinite, or every token is excluded. It comes to
the host with the tokens, so that looking for it costs no transfer of its own."""
EXP2 = (1.0, 0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
"""A polynomial of ``2**x`` from -0.5 to 0.5, exact at 0, within 1.9e-7 of it in float32 (least maximum, by Lawson's
iteration); not the library's, which is another one on each device."""
ROUNDER = 12582912.0  # 1.5 * 2**23: a float32 of less than 2**22 added to it has no fraction left
_LARGEST = torch.finfo(torch.float32).max


def edited(logits: Tensor, edits: Tensor, row: SamplingRow) -> Tensor:
    """``[vocab]`` float32 after penalties and banned ids.

    As in TensorRT-LLM every penalty counts the prompt as well as the output, a positive logit is divided by the
    repetition penalty and a negative one multiplied with it, and the result stays finite. Only logits of tokens that
    were there change; those that are not finite stay as they are.
    """
    repetition, presence, frequency = torch.tensor(
        [row.repetition_penalty, row.presence_penalty, row.frequency_penalty], dtype=torch.float32
    )
    kept = torch.where(logits > 0, logits / repetition, logits * repetition).clamp(-_LARGEST, _LARGEST)
    lost = (presence + frequency * edits.float()).clamp(-_LARGEST, _LARGEST)
    changed = (kept - lost).clamp(-_LARGEST, _LARGEST)
    values = torch.where((edits > 0) & logits.isfinite(), changed, logits)
    return values.masked_fill(edits == BANNED, -torch.inf)


def weights(logits: Tensor, scales: Tensor) -> Tensor:
    """``[rows, vocab]`` int64 from float32 logits and ``scales`` [rows, 1]. Rows have a finite maximum."""
    exponents = ((logits - logits.amax(dim=-1, keepdim=True)) * scales).clamp_min_(-64.0)
    whole = exponents + ROUNDER - ROUNDER
    rest = exponents - whole  # -0.5 to 0.5
    power = torch.full_like(rest, EXP2[-1])
    for factor in reversed(EXP2[:-1]):
        power = power * rest + factor
    mantissa = (power * 2.0**24).long()  # exact: 24 bits
    return (mantissa << (WEIGHT_BITS - 24)) >> (-whole).long().clamp_max_(63)


def choose(logits: Tensor, rows: Sequence[SamplingRow], indices: Sequence[int]) -> Tensor:
    """``[rows]`` sampled tokens from edited float32 logits, each with a finite maximum; ``indices``: of the numbers."""
    scales = torch.tensor([row.scale for row in rows], dtype=torch.float32).unsqueeze(1)
    kept = weights(logits, scales)
    if any(row.is_restricted for row in rows):
        _restrict(kept, logits, rows)
    floors = torch.tensor([row.min_weight for row in rows]).unsqueeze(1)
    kept.masked_fill_(kept < floors, 0)
    cumulative = kept.cumsum(dim=-1)
    wanted = [
        random_bits(row.seed, index) * total >> 64
        for row, index, total in zip(rows, indices, cumulative[:, -1].tolist(), strict=True)
    ]
    return torch.searchsorted(cumulative, torch.tensor(wanted).unsqueeze(1), right=True).squeeze(1)


def replace_tokens(
    tokens: Tensor, logits: Tensor, rows: Sequence[SamplingRow], edits: Sequence[Tensor | None], indices: Sequence[int]
) -> None:
    """The greedy ``tokens`` [n] of ``logits`` [n, vocab] by what ``rows`` and ``edits`` say; counts them in ``edits``.

    All of them numbers. A row all of whose tokens are excluded gets ``NO_TOKEN``.
    """
    values = logits.float().clone()
    for at, (row, edit) in enumerate(zip(rows, edits, strict=True)):
        if edit is not None:
            values[at] = edited(values[at], edit, row)
    best = values.max(dim=-1)
    tokens.copy_(best.indices.masked_fill_(best.values == -torch.inf, NO_TOKEN))
    sampled = [at for at, token in enumerate(tokens.tolist()) if rows[at].is_sampled and token != NO_TOKEN]
    if sampled:
        tokens[sampled] = choose(values[sampled], [rows[at] for at in sampled], [indices[at] for at in sampled])
    for edit, token in zip(edits, tokens.tolist(), strict=True):
        if edit is not None and token != NO_TOKEN:
            edit[token] += 1


def _restrict(kept: Tensor, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Zeroes the weights of what top-k, then top-p exclude."""
    vocab = kept.shape[1]
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    ordered = kept.gather(1, order)
    top_k = torch.tensor([row.top_k or vocab for row in rows]).unsqueeze(1)
    ordered.masked_fill_(torch.arange(vocab) >= top_k, 0)
    cumulative = ordered.cumsum(dim=-1)
    limits = [
        max(1, -(-total * row.top_p >> 64)) if row.has_top_p else total
        for row, total in zip(rows, cumulative[:, -1].tolist(), strict=True)
    ]
    before = cumulative - ordered  # weight of the likelier tokens
    ordered.masked_fill_(before >= torch.tensor(limits).unsqueeze(1), 0)
    kept.zero_().scatter_(1, order, ordered)
