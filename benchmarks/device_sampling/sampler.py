"""The sampler that would take the runner's place: :mod:`kernels` on CUDA, :mod:`definition` on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from device_sampling.definition import NO_TOKEN, replace_tokens
from device_sampling.rows import SamplingRows
from torch import Tensor

from trtx.torch_engine.batch import Sampled, ScheduledSequence
from trtx.torch_engine.runner.kernels import int32
from trtx.torch_engine.runner.sampler import Sampler, rank_logprobs
from trtx.torch_engine.runner.sampler import _without_numbers as without_numbers

if TYPE_CHECKING:
    from device_sampling.kernels import TritonSampling

ROWS_AT_ONCE = 64


class DeviceSampler(Sampler):
    """A sampled token is a function of its row's logits, its request's seed and how many tokens the request has: it
    depends neither on the batch nor on preemption or handoff, and on the device only through the logits.

    On CUDA the kernels follow the pass on its stream, enqueued while it runs; they are no part of its graph, so that a
    batch of greedy rows launches none of them.
    """

    def __init__(self, max_batch_size: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(max_batch_size)
        self._rows = SamplingRows(max_batch_size, vocab_size, device)
        self._kernels: TritonSampling | None = None
        if device.type == "cuda":
            from device_sampling.kernels import TritonSampling

            self._kernels = TritonSampling(max_batch_size, vocab_size, device)

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
            Sampled(token) if token != NO_TOKEN else without_numbers(sequence)
            for token, sequence in zip(tokens.tolist(), sequences, strict=True)
        ]
        asked = [
            (row, s.sampling.logprobs)
            for row, s in enumerate(sequences)
            if s.sampling.logprobs is not None and results[row].error is None
        ]
        for begin in range(0, len(asked), ROWS_AT_ONCE):
            part = asked[begin : begin + ROWS_AT_ONCE]
            index = int32([row for row, _ in part], logits.device).long()
            entries = rank_logprobs(logits[index], tokens[index], [count for _, count in part])
            for (row, _), entry in zip(part, entries, strict=True):
                results[row].logprobs = entry
        return results

    def _replace_on_cpu(
        self, tokens: Tensor, logits: Tensor, sequences: list[ScheduledSequence], special: list[int]
    ) -> None:
        for begin in range(0, len(special), ROWS_AT_ONCE):
            part = special[begin : begin + ROWS_AT_ONCE]
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
        padding = [0] * (-len(slots) % 4)  # both begin at 16 bytes: a kernel is compiled once
        uploaded = int32(slots + padding + indices + padding, logits.device).view(2, -1)
        kernels.replace_tokens(
            tokens, logits, uploaded[0], uploaded[1], self._rows.on_device,
            has_edits=has_edits, is_sampled=is_sampled, is_restricted=is_restricted,
        )  # fmt: skip
