"""Log-probabilities of rows: ranked on the device behind what computes the logits, dicts on the host later."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from trtx.torch_engine.messages import Logprob

_VECTOR = 16  # float32 numbers: 64 bytes


def to_host(values: Tensor) -> Tensor:
    """A copy that is complete once the device has come so far; on a CPU the tensor itself."""
    return values.to("cpu", non_blocking=True)  # into pinned memory


class RankedLogprobs:
    """Per row of ``logits`` [rows, vocab]: the token of ``chosen`` [rows] and its ``counts`` likeliest.

    Made without waiting for the device. A row without a token (negative) has an entry that means nothing.
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
        """The chosen token first, then the likeliest. Once the step is done."""
        results = []
        rows = zip(*(column.tolist() for column in self._columns), self._counts, strict=True)
        for token, logprob, rank, ids, logprobs, count in rows:
            entry = {token: Logprob(logprob, rank)}
            for place, (other, value) in enumerate(zip(ids[:count], logprobs, strict=False)):
                entry.setdefault(other, Logprob(value, place + 1))
            results.append(entry)
        return results


def _aligned(logits: Tensor) -> Tensor:
    """With tokens of no probability up to whole vectors: each row begins as the first one does, and is summed alike.

    CUDA's softmax sums from the first address that a vector may have, which else is another one in each row.
    """
    return F.pad(logits, (0, -logits.shape[1] % _VECTOR), value=-math.inf)


def _ordered(values: Tensor) -> Tensor:
    """int64 in the order of float32 ``values``, of equal ones in the order of their ids: no two are equal, and which
    are the first few does not go by how many are asked for."""
    bits = values.contiguous().view(torch.int32)
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return (rising << 32) - torch.arange(values.shape[1], device=values.device)


def prompt_problem(logprobs: list[dict[int, Logprob]]) -> str | None:
    """Why a prompt's logprobs are none. One NaN or infinite logit makes every logprob of its row NaN."""
    for entry in logprobs:
        if any(math.isnan(logprob.logprob) for logprob in entry.values()):
            return "the model's logits for tokens of this prompt are not numbers: prompt_logprobs can't be computed"
    return None
