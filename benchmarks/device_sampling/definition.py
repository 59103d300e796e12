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
from device_sampling.rows import BANNED, WEIGHT_BITS, SamplingRow, random_bits
from torch import Tensor

NO_TOKEN = -1
"""In place of a row's token where none is best: a logit is NaN or infinite, or every token is excluded. It comes to
the host with the tokens, so that looking for it costs no transfer of its own."""
EXP2 = (1.0, 0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
"""A polynomial of ``2**x`` from -0.5 to 0.5, exact at 0, within 1.9e-7 of it in float32 (least maximum, by Lawson's
iteration); not the library's, which is another one on each device."""
ROUNDER = 12582912.0  # 1.5 * 2**23: a float32 of less than 2**22 added to it has no fraction left
_LARGEST = torch.finfo(torch.float32).max


def edit_logits(logits: Tensor, edits: Tensor, row: SamplingRow) -> None:
    """Penalties and banned ids, in place on ``[vocab]`` float32.

    As in TensorRT-LLM every penalty counts the prompt as well as the output, a positive logit is divided by the
    repetition penalty and a negative one multiplied with it, and the result stays finite. Only logits of tokens that
    were there change; those that are not finite stay as they are.
    """
    at = edits.nonzero().squeeze(1)
    before, counts = logits[at], edits[at]
    repetition, presence, frequency = torch.tensor(
        [row.repetition_penalty, row.presence_penalty, row.frequency_penalty], dtype=torch.float32
    )
    kept = torch.where(before > 0, before / repetition, before * repetition).clamp_(-_LARGEST, _LARGEST)
    lost = (presence + frequency * counts.float()).clamp_(-_LARGEST, _LARGEST)
    changed = torch.where(before > -torch.inf, (kept - lost).clamp_(-_LARGEST, _LARGEST), before)
    logits[at] = changed.masked_fill_(counts == BANNED, -torch.inf)


def weights(logits: Tensor, scales: Tensor) -> Tensor:
    """``[rows, vocab]`` int64 from float32 logits and ``scales`` [rows, 1]. Rows have a finite maximum."""
    rest = logits - logits.amax(dim=-1, keepdim=True)
    whole = rest.mul_(scales).clamp_min_(-64.0) + ROUNDER
    whole -= ROUNDER
    rest -= whole  # -0.5 to 0.5
    power = rest * EXP2[-1]
    for factor in reversed(EXP2[1:-1]):
        power += factor
        power *= rest
    power += EXP2[0]
    mantissa = power.mul_(2.0**24).long()  # exact: 24 bits
    mantissa <<= WEIGHT_BITS - 24
    mantissa >>= whole.neg_().long().clamp_max_(63)
    return mantissa


def kept_weights(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """``[rows, vocab]`` int64, 0 where a token is excluded, of edited float32 logits with a finite maximum each."""
    kept = weights(logits, torch.tensor([row.scale for row in rows], dtype=torch.float32).unsqueeze(1))
    if any(row.is_restricted for row in rows):
        _restrict(kept, logits, rows)
    if any(row.min_weight for row in rows):
        kept.masked_fill_(kept < torch.tensor([row.min_weight for row in rows]).unsqueeze(1), 0)
    return kept


def draw(kept: Tensor, rows: Sequence[SamplingRow], indices: Sequence[int]) -> Tensor:
    """``[rows]`` tokens by their ``kept`` weights; ``indices``: of each row's random number."""
    cumulative = kept.cumsum(dim=-1)
    wanted = [
        random_bits(row.seed, index) * total >> 64
        for row, index, total in zip(rows, indices, cumulative[:, -1].tolist(), strict=True)
    ]
    return torch.searchsorted(cumulative, torch.tensor(wanted).unsqueeze(1), right=True).squeeze(1)


def replace_tokens(
    tokens: Tensor, logits: Tensor, rows: Sequence[SamplingRow], edits: Sequence[Tensor | None], indices: Sequence[int]
) -> None:
    """Fills ``tokens`` [n] by float32 ``logits`` [n, vocab], which it changes, and counts them in ``edits``.

    All logits are numbers. A row all of whose tokens are excluded gets ``NO_TOKEN``.
    """
    for at, (row, edit) in enumerate(zip(rows, edits, strict=True)):
        if edit is not None:
            edit_logits(logits[at], edit, row)
    best = logits.max(dim=-1)
    tokens.copy_(best.indices.masked_fill_(best.values == -torch.inf, NO_TOKEN))
    sampled = [at for at, token in enumerate(tokens.tolist()) if rows[at].is_sampled and token != NO_TOKEN]
    if sampled:
        chosen = [rows[at] for at in sampled]
        tokens[sampled] = draw(kept_weights(logits[sampled], chosen), chosen, [indices[at] for at in sampled])
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
