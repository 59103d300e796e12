"""Samples a token for each row of logits, and reports rows for which that is impossible."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trtx.torch_engine.runner.kernels import int32
from trtx.torch_engine.runner.logprobs import RankedLogprobs, to_host
from trtx.torch_engine.runner.sampling import definition
from trtx.torch_engine.runner.sampling.definition import NO_TOKEN
from trtx.torch_engine.runner.sampling.masks import TokenMasks
from trtx.torch_engine.runner.sampling.slots import SamplingSlots, is_device_error, unexpected
from trtx.torch_engine.sampling_plan import SamplingPlan
from trtx.torch_engine.step import FROM_SLOT, Sampled, ScheduledSequence

if TYPE_CHECKING:
    from trtx.torch_engine.runner.sampling.triton_sampling import TritonSampling

logger = logging.getLogger(__name__)

_NO_NUMBERS = (
    "the model's logits for this request are not numbers (NaN or infinite), or exclude every token, after {tokens} "
    "tokens: none can be sampled; if other prompts fail too, look at the checkpoint, its dtype and its quantization"
)
_NO_NUMBERS_AFTER_PROCESSORS = (
    "no token can be sampled after {tokens} tokens: after its logits processors, the logits of this request are not "
    "numbers (NaN or plus infinity), or they and its grammar exclude every token; leave at least one token that both "
    "allow"
)
_ROWS_AT_ONCE = 64  # float32 copies of 64 rows with 151,936 logits take 39 MB


class SampledRows:
    """The sampled rows of a forward, while they are copied to the host."""

    def __init__(self, tokens: Tensor, sequences: list[ScheduledSequence], place: int) -> None:
        """Starts the copy of ``tokens`` [rows]; row i belongs to ``sequences[i]``, and follows ``place`` drafted
        tokens.
        """
        self.place = place
        self._tokens = to_host(tokens)
        # tokens before each row's token
        self._known = [one.start + len(one.new_token_ids) - one.num_drafts + place for one in sequences]
        self._processed = frozenset(row for row, one in enumerate(sequences) if one.is_processed)
        self.problems: dict[int, str] = {}
        """Maps a row to the reason why it has no token. Rows that fail because of their logits are not included."""
        self.ranked: list[tuple[tuple[int, ...], RankedLogprobs]] = []
        """(rows, their logprobs)"""

    def results(self) -> list[Sampled]:
        """Returns one result for each row. Call it once the step is done."""
        results = [
            Sampled(token) if token != NO_TOKEN else Sampled(None, error=self._no_numbers(row))
            for row, token in enumerate(self._tokens.tolist())
        ]
        for row, problem in self.problems.items():
            results[row] = Sampled(None, error=problem)
        for rows, ranked in self.ranked:
            for row, entry in zip(rows, ranked.entries(), strict=True):
                if results[row].error is None:
                    results[row].logprobs = entry
        return results

    def _no_numbers(self, row: int) -> str:
        text = _NO_NUMBERS_AFTER_PROCESSORS if row in self._processed else _NO_NUMBERS
        return text.format(tokens=self._known[row])


class Sampler:
    """Temperature, top-k, top-p, min-p, penalties, banned ids and logprobs.

    A sampled token is a function of its row's logits, its request's parameters and seed, and the number of tokens
    generated before it. It does not depend on the batch, on preemption or on handoff, and on the device only as far as
    the logits do. :mod:`trtx.torch_engine.runner.sampling.definition` defines the function. On CUDA, Triton kernels
    compute the same function, in the CUDA graph that computes the logits. An error in one row affects that row's
    ``Sampled`` only.

    For each step, call :meth:`update`, then :meth:`fill` for its decodes, then :meth:`sample` and :meth:`collect` for
    each of its forwards. None of them waits for the device; results are available once the device has done the step.
    """

    def __init__(
        self,
        max_batch_size: int,
        vocab_size: int,
        device: torch.device,
        *,
        counts_prompts: bool = False,
        masks: TokenMasks | None = None,
    ) -> None:
        """``counts_prompts``: see :class:`SamplingSlots`. ``masks`` None: no guided decoding."""
        self.masks = masks
        self._slots = SamplingSlots(max_batch_size, vocab_size, device, counts_prompts=counts_prompts)
        self._vocab_size = vocab_size
        self._device = device
        self._kernels: TritonSampling | None = None
        if device.type == "cuda":  # Triton is imported only on CUDA: torch for CPUs lacks it
            from trtx.torch_engine.runner.sampling.triton_sampling import TritonSampling

            self._kernels = TritonSampling(self._slots.on_device, self._slots.last_tokens, vocab_size, masks)

    def update(self, sequences: list[ScheduledSequence]) -> None:
        """Copies the changes of the slots since the last step to the device, without waiting for the copy."""
        self._slots.update(sequences)

    def fill(self, token_ids: Tensor, slots: Tensor) -> Tensor:
        """Returns ``token_ids`` [rows] int32 with each FROM_SLOT replaced by the last token sampled in its slot.

        ``slots``: [rows] int32. Works inside a CUDA graph.
        """
        if self._kernels is not None:
            return self._kernels.fill(token_ids, slots)
        return torch.where(token_ids == FROM_SLOT, self._slots.last_tokens[slots.long()], token_ids)

    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, out: Tensor | None = None, place: int = 0
    ) -> Tensor:
        """Samples from ``logits`` [rows, vocab]: returns ``[rows]`` int64 tokens, ``NO_TOKEN`` for rows that have none.

        ``slots``, ``positions``: [rows] int32, the slot and position of each row's last known token. A sampled token
        becomes its slot's last token. Overwrites the logits of tokens that the masks exclude. Works inside a CUDA
        graph. Tokens sampled for the padding slot are undefined.

        ``place``: number of drafted tokens before the rows. Call it in ascending order of places, with each slot once
        for each place. A sampled token counts as an output token for the next place, which is right if the drafted
        token is accepted.
        """
        tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device) if out is None else out
        if self._kernels is not None:
            self._kernels.sample(tokens, logits, slots, positions, place)
            return tokens
        rows = list(zip(slots.tolist(), positions.tolist(), strict=True))

        def choose(part: range) -> None:
            chosen = [rows[at] for at in part]
            tokens[part.start : part.stop] = self._define(logits[part.start : part.stop].float(), chosen, place)

        def fail(at: int, error: Exception) -> None:
            tokens[at] = NO_TOKEN
            self._slots.set_problem(rows[at][0], error)

        _in_parts(len(rows), choose, fail)
        self._slots.last_tokens[slots.long()] = tokens.clamp_min(0).int()
        return tokens

    def _define(self, logits: Tensor, rows: list[tuple[int, int]], place: int) -> Tensor:
        known = [self._slots.rows[slot] for slot, _ in rows]
        edits = [self._slots.edits[slot] for slot, _ in rows]
        masks = self.masks
        banned = [None if masks is None else masks.banned(slot, self._vocab_size, place) for slot, _ in rows]
        indices = [row.index(position) for row, (_, position) in zip(known, rows, strict=True)]
        copy = logits.clone() if any(one is not None for one in (*edits, *banned)) else logits
        for at, excluded in enumerate(banned):
            if excluded is not None:
                copy[at].masked_fill_(excluded, -torch.inf)
        return definition.sample(copy, known, edits, indices)

    def own_logits(self, logits: Tensor, sequences: list[ScheduledSequence]) -> dict[int, Tensor]:
        """Copies the logits of rows that want logprobs, before logits processors or :meth:`sample` overwrite them.

        Returns them by row; row i belongs to ``sequences[i]``.
        """
        wanted = [
            at
            for at, one in enumerate(sequences)
            if (one.is_guided or one.is_processed) and one.sampling.logprobs is not None
        ]
        return {at: logits[at].clone() for at in wanted}

    def collect(
        self,
        logits: Tensor,
        tokens: Tensor,
        sequences: list[ScheduledSequence],
        own_logits: Mapping[int, Tensor] = MappingProxyType({}),
        *,
        place: int = 0,
    ) -> SampledRows:
        """Starts the copy of a forward's sampled rows to the host. Row i belongs to ``sequences[i]``.

        Logprobs are computed from the model's own logits, before any sampling parameter is applied. ``own_logits``: the
        result of :meth:`own_logits`, for rows whose logits were overwritten. ``place``: as in :meth:`sample`.
        """
        rows = SampledRows(tokens, sequences, place)
        if self._slots.problems:
            for row, sequence in enumerate(sequences):
                if (problem := self._slots.problems.get(sequence.slot)) is not None:
                    rows.problems[row] = problem
        asked = [
            (row, sequence.sampling.logprobs)
            for row, sequence in enumerate(sequences)
            if sequence.sampling.logprobs is not None and row not in rows.problems
        ]

        def rank(part: range) -> None:
            at, counts = zip(*asked[part.start : part.stop], strict=True)
            index = int32(list(at), logits.device).long()
            own = logits[index]
            for place, row in enumerate(at):
                if row in own_logits:
                    own[place] = own_logits[row]
            rows.ranked.append((at, RankedLogprobs(own, tokens[index], list(counts))))

        def fail(at: int, error: Exception) -> None:
            rows.problems[asked[at][0]] = unexpected(error)

        _in_parts(len(asked), rank, fail)
        return rows

    def warm_up(self, dtype: torch.dtype) -> None:
        """On CUDA, compiles and loads all kernels that a request may need later, for logits of ``dtype``."""
        plan = SamplingPlan(is_greedy=False, top_k=2, repetition_penalty=1.1, logprobs=1)
        sequence = ScheduledSequence(0, True, [0], 0, [], True, plan, [0], [], 0, banned_ids=(0,))
        self.update([sequence])
        logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self._device)
        at = int32([0], self._device)
        self.collect(logits, self.sample(logits, self.fill(at, at), at), [sequence])
        sequence.sampling, sequence.banned_ids = SamplingPlan(), ()
        self.update([sequence])


def _in_parts(count: int, run: Callable[[range], None], fail: Callable[[int, Exception], None]) -> None:
    """Calls ``run`` with consecutive ranges of the rows ``[0, count)``.

    If ``run`` raises for a range, it is called again for each row of the range, and ``fail`` is called for each row
    that raises again. Device errors are raised.
    """
    for begin in range(0, count, _ROWS_AT_ONCE):
        part = range(begin, min(begin + _ROWS_AT_ONCE, count))
        try:
            run(part)
            continue
        except Exception as error:
            if is_device_error(error):
                raise
            logger.exception("%d rows failed together; each is tried alone", len(part))
        for at in part:
            try:
                run(range(at, at + 1))
            except Exception as error:
                if is_device_error(error):
                    raise
                fail(at, error)
