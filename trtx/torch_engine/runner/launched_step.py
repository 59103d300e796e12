"""A launched step: its forwards, the sampling of their rows, and the results that come back from the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trtx.torch_engine.runner.logprobs import RankedLogprobs, prompt_problem
from trtx.torch_engine.runner.sampler import SampledRows, Sampler
from trtx.torch_engine.step import LogitsEdit, Sampled, ScheduledSequence


@dataclass(slots=True, eq=False)
class SampledForward:
    """A forward's logits, and how tokens are sampled from them."""

    logits: Tensor  # [rows, vocab]
    sequences: list[ScheduledSequence]  # one for each row
    places: list[int]  # of the rows in the step
    sample: Callable[[], Tensor]  # samples tokens [rows] from the logits
    own_logits: dict[int, Tensor] = field(default_factory=dict)  # by row: copies from before the logits are edited
    place: int = 0  # number of guesses before the rows


@dataclass(slots=True, eq=False)
class TorchStep:
    """A :class:`trtx.torch_engine.step.LaunchedStep`: collects the results of its forwards from the device."""

    size: int
    sampler: Sampler
    forwards: list[SampledForward] = field(default_factory=list)  # those with rows to sample
    parts: list[tuple[list[int], SampledRows]] = field(default_factory=list)  # (places of the rows in the step, rows)
    prompts: list[tuple[int, list[RankedLogprobs]]] = field(default_factory=list)  # (place in the step, its logprobs)
    edits_on: Any = None  # the CUDA stream on which logits are edited; None on a CPU
    read_load: Callable[[], None] | None = None  # updates the balance of experts after the step
    done: Any = None  # a CUDA event after all of the work; None on a CPU, where work is synchronous

    @torch.inference_mode()
    def sample(self, slots: Sequence[int] = (), edit: LogitsEdit | None = None, masks_per_slot: int = 1) -> None:
        """See :meth:`trtx.torch_engine.step.LaunchedStep.sample`."""
        for forward in self.forwards:
            forward.own_logits = self.sampler.own_logits(forward.logits, forward.sequences)
        if edit is not None:
            self._edit_logits(edit)
        if self.sampler.masks is not None:
            self.sampler.masks.limit(slots, masks_per_slot)
        for forward in self.forwards:
            collected = self.sampler.collect(
                forward.logits, forward.sample(), forward.sequences, forward.own_logits, place=forward.place
            )
            self.parts.append((forward.places, collected))
        if self.done is not None:
            self.done.record()

    def _edit_logits(self, edit: LogitsEdit) -> None:
        """Calls users' code on a stream of its own, which the rest of the step waits for.

        The engine works on the default stream, whose address is 0. ``torch.cuda.ExternalStream(0)`` is another stream
        (seen in torch 2.11), so code that is given this address would not run in the engine's order.
        """
        if self.edits_on is None:
            edit(self._edited_rows(), None)
            return
        engine = torch.cuda.current_stream()
        self.edits_on.wait_stream(engine)
        with torch.cuda.stream(self.edits_on):
            edit(self._edited_rows(), self.edits_on.cuda_stream)
        engine.wait_stream(self.edits_on)

    def _edited_rows(self) -> dict[int, Tensor]:
        return {
            sequence.slot: forward.logits[row].view(1, 1, -1)
            for forward in self.forwards
            for row, sequence in enumerate(forward.sequences)
            if sequence.is_processed
        }

    def results(self) -> list[Sampled]:
        """See :meth:`trtx.torch_engine.step.LaunchedStep.results`."""
        if self.done is not None:
            self.done.synchronize()
        if self.read_load is not None:
            self.read_load()
        results = [Sampled(None) for _ in range(self.size)]
        for places, rows in self.parts:
            for place, sampled in zip(places, rows.results(), strict=True):
                if rows.place:
                    results[place].after_drafts.append(sampled)
                else:
                    results[place] = sampled
        for place, ranked in self.prompts:
            if results[place].error is None:
                found = [entry for part in ranked for entry in part.entries()]
                results[place].prompt_logprobs, results[place].error = found, prompt_problem(found)
        return results
