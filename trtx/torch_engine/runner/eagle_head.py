"""Drafts with an EAGLE-3 head: one forward over the new tokens, then one forward for each further draft token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtx.torch_engine.drafting import DraftShare
from trtx.torch_engine.runner.eagle_decoder import EagleDecoder
from trtx.torch_engine.runner.features import FeatureStore
from trtx.torch_engine.runner.kernels import KvCache, PassInputs, Spans, int32
from trtx.torch_engine.runner.slots import BlockTable

_WARM_UP_PASSES = 2  # Triton compiles outside the capture


@dataclass(frozen=True, slots=True)
class _ChainGraph:
    graph: torch.cuda.CUDAGraph
    rows: int


class DraftChain:
    """The passes after the first: each reads the token and the hidden state that the pass before wrote, in the same
    memory.

    On CUDA each size of batch has a CUDA graph.
    """

    def __init__(
        self, decoder: EagleDecoder, cache: KvCache, hidden_size: int, dtype: torch.dtype, graph_sizes: Sequence[int]
    ) -> None:
        """``graph_sizes``: ascending; (): no CUDA graphs."""
        self._decoder = decoder
        self._padding_slot = cache.padding_slot
        rows = cache.padding_slot
        device = cache.pool.device
        self._inputs = torch.zeros(3, rows, dtype=torch.int32, device=device)  # tokens, positions, slots
        self._hidden = torch.zeros(rows, hidden_size, dtype=dtype, device=device)
        self._graphs: list[_ChainGraph] = []
        if graph_sizes:
            self._inputs[2] = self._padding_slot
            memory = torch.cuda.graph_pool_handle()
            for size in reversed(graph_sizes):
                for _ in range(_WARM_UP_PASSES):
                    self._run(size)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory):
                    self._run(size)
                self._graphs.insert(0, _ChainGraph(graph, size))

    def _run(self, rows: int) -> None:
        tokens, positions, slots = self._inputs[:, :rows].unbind(0)
        hidden = self._decoder.hidden(PassInputs(tokens.contiguous(), positions, slots), self._hidden[:rows])
        tokens.copy_(self._decoder.tokens(hidden))
        self._hidden[:rows] = hidden

    def extend(self, first: Tensor, hidden: Tensor, places: list[tuple[list[int], list[int]]]) -> list[Tensor]:
        """Returns the tokens ``[rows]`` of the passes after ``first``, one tensor for each of ``places``.

        ``places``: for each pass the positions and the slots of its rows.
        """
        rows = first.shape[0]
        found = next((one for one in self._graphs if one.rows >= rows), None)
        size = found.rows if found is not None else rows
        self._inputs[0, :rows], self._hidden[:rows] = first, hidden
        uploaded = int32(
            [
                value
                for positions, slots in places
                for value in (
                    *positions, *[0] * (size - rows), *slots, *[self._padding_slot] * (size - rows),
                )
            ],
            first.device,
        ).view(-1, 2, size)  # fmt: skip
        drafted: list[Tensor] = []
        for place in uploaded.unbind(0):
            self._inputs[1:, :size] = place
            if found is not None:
                found.graph.replay()
            else:
                self._run(size)
            drafted.append(self._inputs[0, :rows].clone())
        return drafted


class EagleHead:
    """A :class:`trtx.torch_engine.drafting.DraftModel`."""

    token_shift = 1

    def __init__(
        self,
        decoder: EagleDecoder,
        chain: DraftChain,
        features: FeatureStore,
        cache: KvCache,
        block_table: BlockTable,
        pools: tuple[Tensor, ...],
    ) -> None:
        """``cache``: the head's KV, in blocks with the target model's ids. ``block_table``: the target model's.

        ``pools``: the memory of both the KV and the features.
        """
        self._decoder = decoder
        self._chain = chain
        self._features = features
        self._device = cache.pool.device
        self._padding_slot = cache.padding_slot
        self._block_table = block_table
        self.pools = pools
        self.room = cache.block_table.shape[1] * cache.tokens_per_block

    @torch.inference_mode()
    def draft(self, shares: Sequence[DraftShare]) -> list[list[int]]:
        """See :class:`trtx.torch_engine.drafting.DraftModel`."""
        self._block_table.update(shares)
        inputs, drafting = self._inputs(shares), [share for share in shares if share.count]
        hidden = self._decoder.hidden(inputs, self._features.read(inputs))
        if not drafting:
            if self._device.type == "cuda":  # the host tier may copy what this pass writes
                torch.cuda.current_stream(self._device).synchronize()
            return [[] for _ in shares]
        tokens = self._decoder.tokens(hidden)
        places = [
            (
                [_end(one) + place if one.count > place + 1 else 0 for one in drafting],
                [one.slot if one.count > place + 1 else self._padding_slot for one in drafting],
            )
            for place in range(max(one.count for one in drafting) - 1)
        ]
        passes = [tokens, *self._chain.extend(tokens, hidden, places)] if places else [tokens]
        columns = iter(torch.stack(passes, dim=1).tolist())
        return [next(columns)[: share.count] if share.count else [] for share in shares]

    def _inputs(self, shares: Sequence[DraftShare]) -> PassInputs:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for share in shares:
            tokens += share.tokens
            positions += range(share.start, _end(share))
            slots += [share.slot] * len(share.tokens)
            starts.append(len(tokens))
        first, second, third = int32(tokens + positions + slots, self._device).view(3, -1).unbind(0)
        spans = Spans(
            slots=int32([share.slot for share in shares], self._device),
            starts=int32(starts, self._device),
            contexts=int32([share.start for share in shares], self._device),
            max_length=max(len(share.tokens) for share in shares),
            max_context=max(share.start for share in shares),
        )
        ends = [end - 1 for share, end in zip(shares, starts[1:], strict=True) if share.count]
        return PassInputs(first, second, third, spans, wanted=int32(ends, self._device))


def _end(share: DraftShare) -> int:
    return share.start + len(share.tokens)
