"""CUDA graphs of the decode forward and of sampling, for each padded batch size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trtx.torch_engine.runner.decoder import Decoder
from trtx.torch_engine.runner.fixed_inputs import FixedInputs, stride
from trtx.torch_engine.runner.kernels import KvCache, PassInputs
from trtx.torch_engine.runner.sampler import Sampler

_WARM_UP_PASSES = 2  # Triton compiles and cuBLAS picks its workspace outside the capture


def default_batch_sizes(max_batch_size: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 32, then every 32 up to 512, then every 128: little padding in large batches."""
    sizes = [1, 2, 4, 8, 16, *range(32, 513, 32), *range(640, max_batch_size + 128, 128)]
    return (*(size for size in sizes if size < max_batch_size), max_batch_size)


@dataclass(frozen=True, slots=True)
class _SizeGraphs:
    forward: torch.cuda.CUDAGraph
    sample: torch.cuda.CUDAGraph
    logits: Tensor
    sampled: Tensor


class DecodeGraphs:
    """CUDA graphs of decodes, captured at start: one that ends with the logits, and one that samples from them.

    Between the two, the host may decide which tokens a row may sample. All sizes share the same input and output
    memory: the results are valid until the next :meth:`replay`.
    """

    def __init__(
        self, decoder: Decoder, sampler: Sampler, cache: KvCache, batch_sizes: list[int], vocab_size: int
    ) -> None:
        """Captures all sizes of the ascending ``batch_sizes``, largest first, so that the others reuse its memory."""
        self._sizes = batch_sizes
        self._padding_slot = cache.padding_slot
        device, largest = cache.pool.device, self._sizes[-1]
        # Tokens, positions and slots of one size, one after the other.
        self._inputs = FixedInputs(3 * stride(largest), device)
        inputs = self._inputs.tensor
        self._graphs: dict[int, _SizeGraphs] = {}
        self.memory = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            logits = torch.empty(largest, vocab_size, dtype=decoder.dtype, device=device)
            sampled = torch.empty(largest, dtype=torch.int64, device=device)
            for size in reversed(self._sizes):
                token_ids, positions, slots = (row[:size] for row in inputs[: 3 * stride(size)].view(3, -1))

                def forward(
                    token_ids: Tensor = token_ids, positions: Tensor = positions, slots: Tensor = slots,
                    size: int = size,
                ) -> None:  # fmt: skip
                    filled = PassInputs(sampler.fill(token_ids, slots), positions, slots)
                    decoder.logits(decoder.hidden(filled), out=logits[:size])

                def sample(positions: Tensor = positions, slots: Tensor = slots, size: int = size) -> None:
                    sampler.sample(logits[:size], slots, positions, out=sampled[:size])

                inputs.zero_()
                slots.fill_(cache.padding_slot)
                for _ in range(_WARM_UP_PASSES):
                    forward()
                    sample()
                graphs = _SizeGraphs(torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), logits[:size], sampled[:size])
                for graph, run in ((graphs.forward, forward), (graphs.sample, sample)):
                    with torch.cuda.graph(graph, pool=self.memory):
                        run()
                self._graphs[size] = graphs

    def fits(self, num_sequences: int) -> bool:
        """False for a batch larger than the largest graph; it runs without a graph."""
        return num_sequences <= self._sizes[-1]

    def replay(self, tokens: list[int], positions: list[int], slots: list[int]) -> Tensor:
        """Launches one decode forward. Returns its logits [rows, vocab], without waiting for them."""
        rows = len(tokens)
        size = next(size for size in self._sizes if size >= rows)
        length = 3 * stride(size)
        values = self._inputs.values()[:length].reshape(3, -1)
        values[0, :rows], values[1, :rows], values[2, :rows] = tokens, positions, slots
        values[:2, rows:] = 0
        values[2, rows:] = self._padding_slot
        self._inputs.send(length)
        self._replayed, self._rows = self._graphs[size], rows
        self._replayed.forward.replay()
        return self._replayed.logits[:rows]

    def sample(self) -> Tensor:
        """Samples from the logits of the last :meth:`replay`.

        Returns the tokens [rows] int64, without waiting for them.
        """
        self._replayed.sample.replay()
        return self._replayed.sampled[: self._rows]
