"""The sampler's state of each slot, on host and device: sampling parameters, penalties and banned ids."""

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
    """Sampling rows by slot.

    A row is uploaded when a sequence takes the slot, or when its banned ids change; nothing else is transferred. Edits
    (penalties and banned ids) are one int32 for each token of the vocabulary, only for sequences that need them; see
    :func:`trtx.torch_engine.runner.sampling.definition.sample`. A sampled token is counted on the device and stored as
    its slot's last token, because the next step may need both before the host knows the token.
    """

    def __init__(
        self, max_batch_size: int, vocab_size: int, device: torch.device, *, counts_prompts: bool = False
    ) -> None:
        """``counts_prompts``: index the seed's stream by the token's position in the whole sequence.

        A request that continues an answer, with the answer's beginning as a part of its prompt, then samples the same
        tokens.
        """
        self._counts_prompts = counts_prompts
        self._vocab_size = vocab_size
        self._device = device
        slots = max_batch_size + 1  # the last one is the padding slot
        self._banned: list[tuple[int, ...]] = [()] * slots
        self._fields = [PLAIN_FIELDS] * slots  # the device's current values
        self._changed: dict[int, tuple[int, ...]] = {}
        self._plain = SamplingRow.of(SamplingPlan(), 0, 0, vocab_size)
        self.rows = [self._plain] * slots
        self.edits: list[Tensor | None] = [None] * slots
        self.problems: dict[int, str] = {}
        """Slot to the reason why its sequence can't be sampled."""
        self.on_device = torch.zeros(slots, FIELDS, dtype=torch.int64, device=device)
        self.last_tokens = torch.zeros(slots, dtype=torch.int32, device=device)
        """[slots] each slot's last sampled token; 0 for ``NO_TOKEN``, as a step may use it before the host knows it."""

    def update(self, sequences: list[ScheduledSequence]) -> None:
        """Updates the slots before a step of ``sequences``: enqueues one small copy for all changed rows."""
        banned = self._banned
        for sequence in sequences:
            if sequence.is_first:
                self._write(sequence)
                continue
            if sequence.dropped_token_ids:
                self._uncount(sequence)
            if sequence.banned_ids is not banned[sequence.slot]:
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

    def _uncount(self, sequence: ScheduledSequence) -> None:
        """Removes the tokens that were sampled after a rejected draft token from a slot's counts."""
        edits = self.edits[sequence.slot]
        if edits is None or not sequence.sampling.has_penalties or sequence.slot in self.problems:
            return
        try:
            dropped = int32(list(sequence.dropped_token_ids), self._device)
            edits.index_add_(0, dropped, torch.full_like(dropped, -1))
        except Exception as error:
            self.set_problem(sequence.slot, error)

    def _lift_ban(self, sequence: ScheduledSequence) -> None:
        """Removes all bans of a slot. The banned ids were not sampled meanwhile, so the host knows their counts."""
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
        """Records an error that concerns one sequence. Raises device errors: the device is then in an unknown state."""
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
    """``[vocab]`` int32 zeros. The same allocation holds the kernels' edited logits after them, aligned to 16 bytes."""
    return torch.zeros(2, -(-vocab_size // 4) * 4, dtype=torch.int32, device=device)[0, :vocab_size]


def is_device_error(error: Exception) -> bool:
    """Whether an error may leave the device in an unknown state. No request causes such an error, and the engine can't
    go on after it.
    """
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def unexpected(error: Exception) -> str:
    """Error text for the client."""
    return f"no token could be sampled: {type(error).__name__}: {str(error)[:500]}"
