"""Forwards with prompt chunks, padded to a few sizes: CUDA graph buckets on CUDA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from trtx.torch_engine.runner.decoder import Decoder
from trtx.torch_engine.runner.fixed_inputs import FixedInputs, Int32, stride
from trtx.torch_engine.runner.kernels import KvCache, PassInputs, Spans
from trtx.torch_engine.runner.packed_pass import PackedPass
from trtx.torch_engine.runner.sampler import Sampler

_Memory = TypeVar("_Memory", Tensor, Int32)
_TOKENS_OF_SPAN = 16  # tokens of a bucket for each chunk that it has room for
_TOKENS_OF_DRAFT = 2  # the same, if sequences may have drafts: a token and a drafted one


@dataclass(frozen=True, slots=True)
class PassSize:
    """Capacity of one CUDA graph bucket. Its inputs lie one after the other, each aligned to 16 bytes."""

    tokens: int
    decodes: int
    spans: int

    @classmethod
    def of(cls, tokens: int, max_batch_size: int, *, drafts: bool = False) -> PassSize:
        per_span = _TOKENS_OF_DRAFT if drafts else _TOKENS_OF_SPAN
        return cls(tokens, min(tokens, max_batch_size), min(-(-tokens // per_span), max_batch_size))

    def holds(self, packed: PackedPass) -> bool:
        num_chunks = len(packed.sequences) - packed.num_decodes
        if packed.has_drafts and self.num_wanted < self.tokens:
            return False
        return len(packed.tokens) <= self.tokens and packed.num_decodes <= self.decodes and num_chunks <= self.spans

    @property
    def num_wanted(self) -> int:
        """Number of hidden-state rows returned: one for each decode slot and chunk slot, at most one for each token."""
        return min(self.tokens, self.decodes + self.spans)

    def firsts(self, packed: PackedPass) -> list[int]:
        """For each sequence of a batch that fits: the row of :attr:`PackedPass.firsts` among the hidden states."""
        if self.num_wanted == self.tokens:
            return packed.firsts
        return [*range(packed.num_decodes), *(self.decodes + chunk for chunk in range(len(packed.chunks)))]

    @property
    def _parts(self) -> tuple[int, ...]:
        """Lengths of the inputs: tokens, positions, slots; decode starts; chunk slots, starts and contexts."""
        return (self.tokens,) * 3 + (self.decodes + 1, self.spans, self.spans + 1, self.spans)

    @property
    def num_inputs(self) -> int:
        return sum(stride(part) for part in self._parts)

    def _split(self, memory: _Memory) -> list[_Memory]:
        begins, parts = [0], self._parts
        for part in parts:
            begins.append(begins[-1] + stride(part))
        return [memory[begin : begin + part] for begin, part in zip(begins, parts, strict=False)]

    def inputs(self, memory: Tensor) -> PassInputs:
        """Views into ``memory`` [num_inputs] int32. Content that :meth:`fill` has not written is undefined."""
        tokens, positions, slots, ones, chunk_slots, starts, contexts = self._split(memory)
        # A decode is a span of one token; an unused decode slot is an empty span. So decodes and chunks share the token
        # rows.
        decodes = Spans(slots[: self.decodes], ones, positions[: self.decodes], 1)
        spans = Spans(chunk_slots, starts, contexts, self.tokens)
        wanted = None
        if self.num_wanted < self.tokens:
            of_decodes = torch.arange(self.decodes, dtype=torch.int32, device=memory.device)
            wanted = torch.cat((of_decodes, (starts[1:] - 1).clamp_(min=0)))
        return PassInputs(tokens, positions, slots, spans, decodes=decodes, wanted=wanted)

    def fill(self, memory: Int32, packed: PackedPass, padding_slot: int) -> None:
        """Writes a batch that fits. The rest is filled with tokens of the padding slot and with empty spans."""
        tokens, positions, slots, ones, chunk_slots, starts, contexts = self._split(memory)
        count, chunks = len(packed.tokens), packed.chunks
        tokens[:count], positions[:count], slots[:count] = packed.tokens, packed.positions, packed.slots
        tokens[count:], positions[count:], slots[count:] = 0, 0, padding_slot
        ones[: packed.num_decodes] = range(packed.num_decodes)
        ones[packed.num_decodes :] = packed.num_decodes
        chunk_slots[: len(chunks)] = [sequence.slot for sequence in chunks]
        chunk_slots[len(chunks) :] = padding_slot
        starts[: len(chunks) + 1] = packed.chunk_starts
        starts[len(chunks) + 1 :] = count
        contexts[: len(chunks)] = [sequence.start for sequence in chunks]
        contexts[len(chunks) :] = 0


class PaddedPasses:
    """From token ids to hidden states in padded buckets.

    With CUDA graphs, captured at start, a forward is one launch.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampler: Sampler,
        cache: KvCache,
        sizes: list[int],
        *,
        memory: Any,
        drafts: bool = False,
    ) -> None:
        """``sizes``: token counts, ascending. ``drafts``: sequences may have drafted tokens.

        ``memory``: pool handle of other graphs, which these share; None: no CUDA graphs.
        """
        self._decoder = decoder
        self._sampler = sampler
        self._padding_slot = cache.padding_slot
        self._sizes = [PassSize.of(size, cache.padding_slot, drafts=drafts) for size in sizes]
        assert all(one.tokens < other.tokens for one, other in pairwise(self._sizes))
        device = cache.pool.device
        self._inputs = FixedInputs(self._sizes[-1].num_inputs, device)
        self._graphs: dict[PassSize, torch.cuda.CUDAGraph] = {}
        if memory is not None:
            with torch.inference_mode():
                self._capture(memory, device)

    def _capture(self, memory: Any, device: torch.device) -> None:
        """Captures the largest size first, so that the others reuse its memory."""
        most = max(size.num_wanted for size in self._sizes)
        self._hidden = torch.empty(most, self._decoder.hidden_size, dtype=self._decoder.dtype, device=device)
        empty = PackedPass([], 0)
        for size in reversed(self._sizes):
            size.fill(self._inputs.values(), empty, self._padding_slot)
            self._inputs.send(size.num_inputs)
            self._run(size)  # outside the capture: Triton compiles, cuBLAS picks its kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                self._hidden[: size.num_wanted] = self._run(size)
            self._graphs[size] = graph

    def _run(self, size: PassSize) -> Tensor:
        inputs = size.inputs(self._inputs.tensor)
        return self._decoder.hidden(replace(inputs, token_ids=self._sampler.fill(inputs.token_ids, inputs.slots)))

    def fits(self, packed: PackedPass) -> bool:
        """False for a batch with media, beyond the largest size, or that needs all hidden states; it runs unpadded."""
        return not packed.media and not packed.needs_all and any(size.holds(packed) for size in self._sizes)

    def hidden(self, packed: PackedPass) -> tuple[Tensor, list[int]]:
        """Launches a batch that fits, without waiting for it.

        Returns (hidden states ``[rows, hidden]``, for each sequence the row of the first token that is sampled after),
        valid until the next call.
        """
        size = next(size for size in self._sizes if size.holds(packed))
        size.fill(self._inputs.values(), packed, self._padding_slot)
        self._inputs.send(size.num_inputs)
        if not self._graphs:
            return self._run(size), size.firsts(packed)
        self._graphs[size].replay()
        return self._hidden[: size.num_wanted], size.firsts(packed)
