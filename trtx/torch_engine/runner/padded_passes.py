"""Passes over prompts' chunks, with decodes before them or none, padded to a few sizes: on CUDA a graph of each."""

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
_TOKENS_OF_SPAN = 16  # so many of a size's tokens make room for one more chunk


@dataclass(frozen=True, slots=True)
class PassSize:
    """What a padded pass has room for. Its inputs lie one behind the other, each at a multiple of 16 bytes."""

    tokens: int
    decodes: int
    spans: int

    @classmethod
    def of(cls, tokens: int, max_batch_size: int) -> PassSize:
        return cls(tokens, min(tokens, max_batch_size), min(-(-tokens // _TOKENS_OF_SPAN), max_batch_size))

    def holds(self, packed: PackedPass) -> bool:
        num_chunks = len(packed.sequences) - packed.num_decodes
        return len(packed.tokens) <= self.tokens and packed.num_decodes <= self.decodes and num_chunks <= self.spans

    @property
    def num_wanted(self) -> int:
        """Rows of hidden states that come back: of each decode and of each chunk's last token, or of all tokens where
        those are no more."""
        return min(self.tokens, self.decodes + self.spans)

    def lasts(self, packed: PackedPass) -> list[int]:
        """Of each sequence of a pass that it :meth:`holds`: which of those rows its last token has."""
        if self.num_wanted == self.tokens:
            return packed.lasts
        return [*range(packed.num_decodes), *(self.decodes + chunk for chunk in range(len(packed.chunks)))]

    @property
    def _parts(self) -> tuple[int, ...]:
        """Tokens, positions, slots; where decodes begin and the last ends; slots, starts and contexts of chunks."""
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
        """Views of ``memory`` [num_inputs] int32. What :meth:`fill` has not written means nothing."""
        tokens, positions, slots, ones, chunk_slots, starts, contexts = self._split(memory)
        # A decode is a span of one token, one that is not there a span of none: decodes and chunks share the rows.
        decodes = Spans(slots[: self.decodes], ones, positions[: self.decodes], 1)
        spans = Spans(chunk_slots, starts, contexts, self.tokens)
        wanted = None
        if self.num_wanted < self.tokens:
            of_decodes = torch.arange(self.decodes, dtype=torch.int32, device=memory.device)
            wanted = torch.cat((of_decodes, (starts[1:] - 1).clamp_(min=0)))
        return PassInputs(tokens, positions, slots, spans, decodes=decodes, wanted=wanted)

    def fill(self, memory: Int32, packed: PackedPass, padding_slot: int) -> None:
        """Writes a pass that it :meth:`holds`: behind it lie tokens of the padding slot, and spans of none."""
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
    """From token ids to hidden states. With graphs they are captured at start, and a pass launches one thing."""

    def __init__(
        self,
        decoder: Decoder,
        sampler: Sampler,
        cache: KvCache,
        sizes: list[int],
        *,
        memory: Any,
    ) -> None:
        """``sizes``: tokens, ascending. ``memory``: the pool handle of other graphs, which these share; None: none."""
        self._decoder = decoder
        self._sampler = sampler
        self._padding_slot = cache.padding_slot
        self._sizes = [PassSize.of(size, cache.padding_slot) for size in sizes]
        assert all(one.tokens < other.tokens for one, other in pairwise(self._sizes))
        device = cache.pool.device
        self._inputs = FixedInputs(self._sizes[-1].num_inputs, device)
        self._graphs: dict[PassSize, torch.cuda.CUDAGraph] = {}
        if memory is not None:
            with torch.inference_mode():
                self._capture(memory, device)

    def _capture(self, memory: Any, device: torch.device) -> None:
        """The largest first: the others share its memory."""
        most = max(size.num_wanted for size in self._sizes)
        self._hidden = torch.empty(most, self._decoder.hidden_size, dtype=self._decoder.dtype, device=device)
        empty = PackedPass([], 0)
        for size in reversed(self._sizes):
            size.fill(self._inputs.values(), empty, self._padding_slot)
            self._inputs.send(size.num_inputs)
            self._run(size)  # Triton compiles and cuBLAS picks its kernels outside the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                self._hidden[: size.num_wanted] = self._run(size)
            self._graphs[size] = graph

    def _run(self, size: PassSize) -> Tensor:
        inputs = size.inputs(self._inputs.tensor)
        return self._decoder.hidden(replace(inputs, token_ids=self._sampler.fill(inputs.token_ids, inputs.slots)))

    def fits(self, packed: PackedPass) -> bool:
        """False for a pass with media, beyond the largest size, or of which all hidden states are asked for: it then
        runs as it is."""
        return not packed.media and not packed.needs_all and self._sizes[-1].holds(packed)

    def hidden(self, packed: PackedPass) -> tuple[Tensor, list[int]]:
        """(hidden states ``[rows, hidden]``, of each sequence the row of its last token) of a pass that fits, which is
        not waited for; they hold until the next one."""
        size = next(size for size in self._sizes if size.holds(packed))
        size.fill(self._inputs.values(), packed, self._padding_slot)
        self._inputs.send(size.num_inputs)
        if not self._graphs:
            return self._run(size), size.lasts(packed)
        self._graphs[size].replay()
        return self._hidden[: size.num_wanted], size.lasts(packed)
