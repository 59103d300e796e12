"""Sampling in plain torch: runs on a CPU, and defines what the Triton kernels must compute token for token.

The definition, for each row. A row has no token if one of its logits is NaN or plus infinity, or if no token is left. A
greedy row's token is that of its largest logit. Otherwise each token has a *weight*: ``2**40 * 2**((logit - best) *
log2(e) / temperature)`` rounded down to an integer, computed with float32 additions and multiplications that round
alike on every device (:func:`weights`). All later steps use integers, so the order of summation does not matter. Tokens
are ordered by logit, equal ones by id.

*Candidates* are the first ``top_k`` tokens in that order, without those that weigh less than ``min_p * 2**40``. The
drawn token is the first one, in vocabulary order, at which the cumulative weight of the candidates exceeds 64 random
bits of (seed, index, attempt) times their total, over 2**64.

Top-p keeps a token if the tokens before it, in the order, have less than ``top_p`` of the weight of the top-k tokens;
it always keeps the first. If it keeps the drawn token, that is the result. Otherwise it keeps no token after it either,
and the next attempt draws among the candidates before it. So each kept token is drawn as often as among the kept tokens
alone, without a search for the end of top-p: rejection sampling with a rising pivot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtx.torch_engine.runner.sampling.rows import WEIGHT_BITS, SamplingRow, random_bits
from trtx.torch_engine.sampling_plan import LARGEST_FLOAT

NO_TOKEN = -1
"""Marks a row without a token. It reaches the host with the tokens, so that the check costs no extra transfer."""
BANNED = -(2**31)
"""In place of a count in a row's penalties (its edits): the token must not be sampled."""
EXP2 = (1.0, 0.6931470036506653, 0.24022242426872253, 0.05550733581185341, 0.009671512991189957, 0.001326472731307149)
"""Coefficients of a polynomial for ``2**x`` in [-0.5, 0.5].

It is exact at 0 and within 1.9e-7 in float32 (minimax fit by Lawson's iteration). The library's function differs
between devices.
"""
ROUNDER = 12582912.0  # 1.5 * 2**23: adding it to a float32 below 2**22 removes the fraction

LOWEST_EXPONENT = -63.0  # the weight is 0 at this exponent and well above it


def sample(
    logits: Tensor, rows: Sequence[SamplingRow], edits: Sequence[Tensor | None], indices: Sequence[int]
) -> Tensor:
    """Samples int64 tokens ``[n]`` from float32 ``logits`` [n, vocab].

    It overwrites ``logits`` and counts the tokens in ``edits``. ``edits``: None, or for a row with penalties or banned
    ids an int32 for each token of the vocabulary: its count in prompt and output, or ``BANNED``. ``indices``: the index
    of each row's random number.
    """
    for at, (row, edit) in enumerate(zip(rows, edits, strict=True)):
        if edit is not None:
            if logits[at].amax() < torch.inf:
                _edit_logits(logits[at], edit, row)
            else:
                logits[at].fill_(torch.nan)
    best = logits.max(dim=-1)  # NaN if any logit of the row is NaN
    tokens = best.indices.masked_fill_(~best.values.isfinite(), NO_TOKEN)
    sampled = [at for at, token in enumerate(tokens.tolist()) if rows[at].is_sampled and token != NO_TOKEN]
    if sampled:
        tokens[sampled] = draw(logits[sampled], [rows[at] for at in sampled], [indices[at] for at in sampled])
    for edit, token in zip(edits, tokens.tolist(), strict=True):
        if edit is not None and token != NO_TOKEN:
            edit[token] += 1
    return tokens


def weights(logits: Tensor, scales: Tensor) -> Tensor:
    """Token weights ``[rows, vocab]`` int64 from float32 logits and ``scales`` [rows, 1].

    Each row's maximum must be finite.
    """
    rest = logits - logits.amax(dim=-1, keepdim=True)
    whole = rest.mul_(scales).clamp_min_(LOWEST_EXPONENT) + ROUNDER
    whole -= ROUNDER
    rest -= whole  # -0.5 to 0.5
    power = rest * EXP2[-1]
    for factor in reversed(EXP2[1:-1]):
        power += factor
        power *= rest
    power += EXP2[0]
    mantissa = power.mul_(2.0**24).long()  # exact: 24 bits
    mantissa <<= WEIGHT_BITS - 24
    mantissa >>= whole.neg_().long()
    return mantissa


def draw(logits: Tensor, rows: Sequence[SamplingRow], indices: Sequence[int]) -> Tensor:
    """Draws tokens ``[n]`` for sampled rows from float32 logits [n, vocab] after penalties; row maxima are finite."""
    found = weights(logits, torch.tensor([row.scale for row in rows], dtype=torch.float32).unsqueeze(1))
    candidates = found.clone()
    if any(row.top_k for row in rows):
        _exclude_beyond_top_k(candidates, logits, rows)
    totals = candidates.sum(dim=-1).tolist()
    limits = torch.tensor([max(1, -(-total * row.top_p >> 64)) for row, total in zip(rows, totals, strict=True)])
    if any(row.min_weight for row in rows):
        candidates.masked_fill_(candidates < torch.tensor([row.min_weight for row in rows]).unsqueeze(1), 0)
    tokens = torch.empty(len(rows), dtype=torch.int64)
    ids = torch.arange(logits.shape[1])
    drawing, attempt = list(range(len(rows))), 0
    while drawing:
        numbers = [random_bits(rows[at].seed, indices[at], attempt) for at in drawing]
        tokens[drawing] = look_up(candidates[drawing], numbers)
        drawing = [at for at in drawing if rows[at].has_top_p]
        if drawing:
            token, values = tokens[drawing].unsqueeze(1), logits[drawing]
            value = values.gather(1, token)
            is_before = (values > value) | ((values == value) & (ids < token))
            is_kept = (found[drawing] * is_before).sum(dim=-1) < limits[drawing]
            candidates[drawing] *= is_before
            drawing = [at for at, kept in zip(drawing, is_kept.tolist(), strict=True) if not kept]
        attempt += 1
    return tokens


def look_up(candidates: Tensor, numbers: Sequence[int]) -> Tensor:
    """Index ``[n]`` where each row's cumulative weight first exceeds its 64-bit number times the total, over 2**64."""
    cumulative = candidates.cumsum(dim=-1)
    wanted = [number * total >> 64 for number, total in zip(numbers, cumulative[:, -1].tolist(), strict=True)]
    return torch.searchsorted(cumulative, torch.tensor(wanted).unsqueeze(1), right=True).squeeze(1)


def _edit_logits(logits: Tensor, edits: Tensor, row: SamplingRow) -> None:
    """Applies penalties and banned ids to ``[vocab]`` float32 logits, in place.

    As in TensorRT-LLM, every penalty counts the prompt as well as the output, the repetition penalty divides positive
    logits and multiplies negative ones, and the result stays finite. Only logits of tokens that occurred, or are
    banned, change; logits that are not finite stay unchanged.
    """
    at = edits.nonzero().squeeze(1)
    before, counts = logits[at], edits[at]
    repetition, presence, frequency = torch.tensor(
        [row.repetition_penalty, row.presence_penalty, row.frequency_penalty], dtype=torch.float32
    )
    kept = torch.where(before > 0, before / repetition, before * repetition).clamp_(-LARGEST_FLOAT, LARGEST_FLOAT)
    lost = (presence + frequency * counts.float()).clamp_(-LARGEST_FLOAT, LARGEST_FLOAT)
    changed = torch.where(before > -torch.inf, (kept - lost).clamp_(-LARGEST_FLOAT, LARGEST_FLOAT), before)
    logits[at] = changed.masked_fill_(counts == BANNED, -torch.inf)


def _exclude_beyond_top_k(candidates: Tensor, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    vocab = logits.shape[1]
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    top_k = torch.tensor([row.top_k or vocab for row in rows]).unsqueeze(1)
    is_beyond = torch.arange(vocab) >= top_k  # positions in the order by logit
    candidates.masked_fill_(torch.empty_like(is_beyond).scatter_(1, order, is_beyond), 0)
