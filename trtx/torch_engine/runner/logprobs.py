"""Log-probabilities of rows: ranked on the device behind what computes the logits, dicts on the host later."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trtx.torch_engine.messages import Logprob


def to_host(values: Tensor) -> Tensor:
    """A copy that is complete once the device has come so far; on a CPU the tensor itself."""
    return values.to("cpu", non_blocking=True)  # into pinned memory


class RankedLogprobs:
    """Per row of ``logits`` [rows, vocab]: the token of ``chosen`` [rows] and its ``counts`` likeliest.

    Made without waiting for the device. A row without a token (negative) has an entry that means nothing.
    """

    def __init__(self, logits: Tensor, chosen: Tensor, counts: list[int]) -> None:
        values = torch.log_softmax(logits.float(), dim=-1)
        picked = values.gather(1, chosen.long().clamp_min(0).unsqueeze(1))  # [rows, 1]
        ranks = (values > picked).sum(dim=1) + 1
        top = values.topk(min(max(counts), values.shape[1]), dim=1)
        self._counts = counts
        self._columns = [to_host(column) for column in (chosen, picked.squeeze(1), ranks, top.indices, top.values)]

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


def prompt_problem(logprobs: list[dict[int, Logprob]]) -> str | None:
    """Why a prompt's logprobs are none. One NaN or infinite logit makes every logprob of its row NaN."""
    for entry in logprobs:
        if any(math.isnan(logprob.logprob) for logprob in entry.values()):
            return "the model's logits for tokens of this prompt are not numbers: prompt_logprobs can't be computed"
    return None
