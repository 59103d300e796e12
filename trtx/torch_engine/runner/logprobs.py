"""Log-probabilities: ranked on the device right after the logits, converted to dicts on the host later."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from trtx.torch_engine.messages import Logprob

_VECTOR = 16  # float32 elements: 64 bytes


def to_host(values: Tensor) -> Tensor:
    """Starts a copy to the host and returns its target, which is valid once the device has run the copy.

    Returns a CPU tensor unchanged.
    """
    return values.to("cpu", non_blocking=True)  # into pinned memory


class RankedLogprobs:
    """The logprobs of each row of ``logits`` [rows, vocab].

    A row has the logprobs of its token in ``chosen`` [rows] and of its top ``counts`` tokens. The constructor does not
    wait for the device. A row without a token (negative) gets a meaningless entry.
    """

    def __init__(self, logits: Tensor, chosen: Tensor, counts: list[int]) -> None:
        values = torch.log_softmax(_aligned(logits.float()), dim=-1)[:, : logits.shape[1]]
        picked = values.gather(1, chosen.long().clamp_min(0).unsqueeze(1))  # [rows, 1]
        ranks = (values > picked).sum(dim=1) + 1
        likeliest = _ordered(values).topk(min(max(counts), values.shape[1]), dim=1).indices
        self._counts = counts
        columns = (chosen, picked.squeeze(1), ranks, likeliest, values.gather(1, likeliest))
        self._columns = [to_host(column) for column in columns]

    def entries(self) -> list[dict[int, Logprob]]:
        """Returns each row's logprobs: the chosen token first, then the top tokens. Call it once the step is done."""
        results = []
        rows = zip(*(column.tolist() for column in self._columns), self._counts, strict=True)
        for token, logprob, rank, ids, logprobs, count in rows:
            entry = {token: Logprob(logprob, rank)}
            for place, (other, value) in enumerate(zip(ids[:count], logprobs, strict=False)):
                entry.setdefault(other, Logprob(value, place + 1))
            results.append(entry)
        return results


def _aligned(logits: Tensor) -> Tensor:
    """Pads rows with zero-probability tokens to whole vectors, so that all rows have the same alignment.

    CUDA's softmax sums in an order that depends on a row's alignment, so equal rows could get different logprobs.
    """
    return F.pad(logits, (0, -logits.shape[1] % _VECTOR), value=-math.inf)


def _ordered(values: Tensor) -> Tensor:
    """Returns int64 keys that sort like the float32 ``values``; of equal values, the lower token id comes first.

    No two keys in a row are equal, so a request for more top tokens gets the same first ones.
    """
    bits = values.contiguous().view(torch.int32)
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return (rising << 32) - torch.arange(values.shape[1], device=values.device)


def prompt_problem(logprobs: list[dict[int, Logprob]]) -> str | None:
    """Returns why a prompt's logprobs are unusable, or None. One NaN or infinite logit makes its whole row NaN."""
    for entry in logprobs:
        if any(math.isnan(logprob.logprob) for logprob in entry.values()):
            return "the model's logits for tokens of this prompt are not numbers: prompt_logprobs can't be computed"
    return None
