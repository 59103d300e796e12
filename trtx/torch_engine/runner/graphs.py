"""CUDA graphs of the decode pass, one per padded batch size."""

from __future__ import annotations

import torch
from torch import Tensor

from trtx.torch_engine.runner.decoder import Decoder
from trtx.torch_engine.runner.kernels import KvCache, PassInputs
from trtx.torch_engine.runner.sampler import Sampler

_WARM_UP_PASSES = 2  # Triton compiles and cuBLAS picks its workspace outside the capture


def default_batch_sizes(max_batch_size: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 32, then every 32 up to 512, then every 128: little of a large batch is padding."""
    sizes = [1, 2, 4, 8, 16, *range(32, 513, 32), *range(640, max_batch_size + 128, 128)]
    return (*(size for size in sizes if size < max_batch_size), max_batch_size)


class DecodeGraphs:
    """Captured at start, replayed for ever. A graph ends with the sampled tokens, so a step launches one thing.

    Inputs and outputs are the same memory for every size: what :meth:`replay` returns holds until the next one.
    """

    def __init__(
        self, decoder: Decoder, sampler: Sampler, cache: KvCache, batch_sizes: list[int], vocab_size: int
    ) -> None:
        """Captures every size of the ascending ``batch_sizes``, the largest first: the others share its memory."""
        self._sizes = batch_sizes
        self._padding_slot = cache.padding_slot
        device, largest = cache.pool.device, self._sizes[-1]
        self._inputs = torch.zeros(3, largest, dtype=torch.int32, device=device)  # tokens, positions, slots
        self._inputs[2] = cache.padding_slot
        self._host = torch.zeros(3, largest, dtype=torch.int32, pin_memory=True)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        memory = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            logits = torch.empty(largest, vocab_size, dtype=decoder.dtype, device=device)
            sampled = torch.empty(largest, dtype=torch.int64, device=device)
            for size in reversed(self._sizes):
                inputs = PassInputs(*(row[:size] for row in self._inputs))

                def run(inputs: PassInputs = inputs, size: int = size) -> None:
                    decoder.logits(decoder.hidden(inputs), out=logits[:size])
                    sampler.sample(logits[:size], inputs.slots, inputs.positions, out=sampled[:size])

                for _ in range(_WARM_UP_PASSES):
                    run()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=memory):
                    run()
                self._graphs[size] = (graph, logits[:size], sampled[:size])

    def fits(self, num_sequences: int) -> bool:
        """False for a batch beyond the largest size, which then runs without a graph."""
        return num_sequences <= self._sizes[-1]

    def replay(self, tokens: list[int], positions: list[int], slots: list[int]) -> tuple[Tensor, Tensor]:
        """(logits [rows, vocab], their sampled tokens [rows] int64) of one decode pass."""
        rows = len(tokens)
        size = next(size for size in self._sizes if size >= rows)
        padding = size - rows
        host = self._host[:, :size]  # free again: a step ends only when its tokens are on the host
        host.copy_(
            torch.tensor(
                [tokens + [0] * padding, positions + [0] * padding, slots + [self._padding_slot] * padding],
                dtype=torch.int32,
            )
        )
        self._inputs[:, :size].copy_(host, non_blocking=True)
        graph, logits, sampled = self._graphs[size]
        graph.replay()
        return logits[:rows], sampled[:rows]
