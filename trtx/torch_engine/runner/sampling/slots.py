"""What the sampler knows of each slot: its sequence's parameters, its edits of the logits, on the device as well."""

from __future__ import annotations

import logging
from collections import Counter

import torch
from torch import Tensor

from trtx.torch_engine.runner.kernels import int32
from trtx.torch_engine.runner.sampling.definition import BANNED
from trtx.torch_engine.runner.sampling.rows import FIELDS, PLAIN_FIELDS, SamplingRow
from trtx.torch_engine.sampling_plan import SamplingPlan
from trtx.torch_engine.step import ScheduledSequence

logger = logging.getLogger(__name__)


class SamplingSlots:
    """Rows by slot, uploaded when a sequence takes the slot or its banned ids change: else nothing of them travels.

    Edits are one int32 a token of the vocabulary, for sequences with penalties or banned ids alone; see
    :func:`trtx.torch_engine.runner.sampling.definition.sample`. What a step samples is counted where it is sampled, and
    is its slot's last token from then on: the next step may need both before the host knows it.
    """

    def __init__(
        self, max_batch_size: int, vocab_size: int, device: torch.device, *, counts_prompts: bool = False
    ) -> None:
        """``counts_prompts``: a token's number of its seed's stream is its place in the whole sequence, so that an
        answer which goes on elsewhere, with its beginning as part of the prompt, goes on the same."""
        self._counts_prompts = counts_prompts
        self._vocab_size = vocab_size
        self._device = device
        slots = max_batch_size + 1  # the last one is padding's
        self._banned: list[tuple[int, ...]] = [()] * slots
        self._fields = [PLAIN_FIELDS] * slots  # as the device has them
        self._changed: dict[int, tuple[int, ...]] = {}
        self._plain = SamplingRow.of(SamplingPlan(), 0, 0, vocab_size)
        self.rows = [self._plain] * slots
        self.edits: list[Tensor | None] = [None] * slots
        self.problems: dict[int, str] = {}
        """Why a slot's sequence gets no token."""
        self.on_device = torch.zeros(slots, FIELDS, dtype=torch.int64, device=device)
        self.last_tokens = torch.zeros(slots, dtype=torch.int32, device=device)
        """[slots] what each sampled last; 0 in place of ``NO_TOKEN``: a step may compute with it before it is known."""

    def update(self, sequences: list[ScheduledSequence]) -> None:
        """Before a step of ``sequences``: enqueues one small copy for all rows that changed."""
        banned = self._banned
        for sequence in sequences:
            if sequence.is_first:
                self._write(sequence)
            elif sequence.banned_ids is not banned[sequence.slot]:
                self._lift_ban(sequence)
        if self._changed:
            self._upload()

    def _write(self, sequence: ScheduledSequence) -> None:
        slot, plan = sequence.slot, sequence.sampling
        self._banned[slot] = sequence.banned_ids
        self.edits[slot] = None
        self.problems.pop(slot, None)
        try:
            before = 0 if self._counts_prompts else len(sequence.prompt_token_ids)
            row = SamplingRow.of(plan, sequence.seed, before, self._vocab_size)
            edits = self._new_edits(sequence) if sequence.banned_ids or plan.has_penalties else None
            self._set(slot, row, edits)
        except Exception as error:
            self._set(slot, self._plain, None)
            self.set_problem(slot, error)

    def _lift_ban(self, sequence: ScheduledSequence) -> None:
        """Nothing is banned any more. What was, has not been sampled since: the host knows all there is of it."""
        slot, banned = sequence.slot, self._banned[sequence.slot]
        assert not sequence.banned_ids, "a ban comes with the slot, and is lifted whole"
        self._banned[slot] = ()
        if slot in self.problems:
            return
        edits = self.edits[slot]
        try:
            if edits is not None and sequence.sampling.has_penalties:
                known = Counter(sequence.prompt_token_ids + sequence.output_token_ids)
                at = int32([*banned, *(known[token] for token in banned)], self._device).view(2, -1)
                edits.index_copy_(0, at[0].long(), at[1])
            else:
                self._set(slot, self.rows[slot], None)
        except Exception as error:
            self.set_problem(slot, error)

    def _set(self, slot: int, row: SamplingRow, edits: Tensor | None) -> None:
        self.rows[slot], self.edits[slot] = row, edits
        fields = row.fields(0 if edits is None else edits.data_ptr())
        if fields != self._fields[slot]:
            self._fields[slot] = self._changed[slot] = fields

    def set_problem(self, slot: int, error: Exception) -> None:
        """An error of one sequence's own. Raises it if it is the device's, which is in an unknown state then."""
        if is_device_error(error):
            raise error
        logger.exception("slot %d can't be sampled", slot)
        self.problems[slot] = unexpected(error)

    def _upload(self) -> None:
        if self._device.type == "cuda":
            slots = int32(list(self._changed), self._device).long()
            values = torch.tensor(list(self._changed.values()), dtype=torch.int64, pin_memory=True)
            self.on_device[slots] = values.to(self._device, non_blocking=True)
        self._changed.clear()

    def _new_edits(self, sequence: ScheduledSequence) -> Tensor:
        edits = new_edits(self._vocab_size, self._device)
        if sequence.sampling.has_penalties:
            seen = int32(sequence.prompt_token_ids + sequence.output_token_ids, self._device)
            edits.index_add_(0, seen, torch.ones_like(seen))
        if sequence.banned_ids:
            edits.index_fill_(0, int32(list(sequence.banned_ids), self._device).long(), BANNED)
        return edits


def new_edits(vocab_size: int, device: torch.device) -> Tensor:
    """``[vocab]`` int32 zeros. Behind them, from a multiple of 16 bytes on, lie the kernels' edited logits."""
    return torch.zeros(2, -(-vocab_size // 4) * 4, dtype=torch.int32, device=device)[0, :vocab_size]


def is_device_error(error: Exception) -> bool:
    """Whether the device may be in an unknown state after it: no request's fault, and nothing to go on with."""
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def unexpected(error: Exception) -> str:
    """What the client is told."""
    return f"no token could be sampled: {type(error).__name__}: {str(error)[:500]}"
