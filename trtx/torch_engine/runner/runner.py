"""The model runner: computes a scheduled batch and returns sampled tokens."""

# torch leaves its events untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trtx.ipc.shared_tensor import SharedTensor
from trtx.torch_engine.device import device_memory_bytes
from trtx.torch_engine.kv_layout import KvGeometry
from trtx.torch_engine.runner.args import Passes
from trtx.torch_engine.runner.decoder import Decoder
from trtx.torch_engine.runner.embeddings import EmbeddingLoader
from trtx.torch_engine.runner.graphs import DecodeGraphs
from trtx.torch_engine.runner.kernels import KvCache, PassInputs, int32
from trtx.torch_engine.runner.logprobs import RankedLogprobs, prompt_problem
from trtx.torch_engine.runner.packed_pass import PackedPass
from trtx.torch_engine.runner.padded_passes import PaddedPasses
from trtx.torch_engine.runner.sampler import SampledRows, Sampler
from trtx.torch_engine.runner.sampling.masks import TokenMasks
from trtx.torch_engine.runner.slots import BlockTable
from trtx.torch_engine.step import Batch, Sampled, ScheduledSequence, StepEmbedding

_PROMPT_LOGPROB_ROWS = 256  # rows of float32 logits at once: 256 rows of 151,936 are 156 MB


@dataclass(slots=True, eq=False)
class TorchStep:
    """A :class:`trtx.torch_engine.step.LaunchedStep`: collects the results of its forwards from the device."""

    size: int
    pending: list[Callable[[], None]] = field(default_factory=list)  # sample and collect, in the order of the forwards
    masks: TokenMasks | None = None
    parts: list[tuple[list[int], SampledRows]] = field(default_factory=list)  # (places of the rows in the step, rows)
    prompts: list[tuple[int, list[RankedLogprobs]]] = field(default_factory=list)  # (place in the step, its logprobs)
    done: Any = None  # a CUDA event after all of the work; None on a CPU, where work is synchronous

    @torch.inference_mode()
    def sample(self, slots: Sequence[int] = ()) -> None:
        """See :meth:`trtx.torch_engine.step.LaunchedStep.sample`. Without ``slots``, it limits no tokens."""
        if self.masks is not None:
            self.masks.limit(slots)
        for sample in self.pending:
            sample()
        if self.done is not None:
            self.done.record()

    def results(self) -> list[Sampled]:
        """See :meth:`trtx.torch_engine.step.LaunchedStep.results`."""
        if self.done is not None:
            self.done.synchronize()
        results = [Sampled(None) for _ in range(self.size)]
        for places, rows in self.parts:
            for place, sampled in zip(places, rows.results(), strict=True):
                results[place] = sampled
        for place, ranked in self.prompts:
            if results[place].error is None:
                found = [entry for part in ranked for entry in part.entries()]
                results[place].prompt_logprobs, results[place].error = found, prompt_problem(found)
        return results


class TorchRunner:
    """A :class:`trtx.torch_engine.step.ModelRunner`. Not thread-safe: one step at a time.

    By default, a step's decodes and its prompt chunks are two forwards. Decodes replay a CUDA graph whatever else the
    step holds, and chunks are long enough that reading the weights a second time costs little. With ``merges_passes``,
    a step that has both is one forward. With ``pads_passes``, a forward with chunks replays a CUDA graph too, if it
    fits a bucket.

    Everything is enqueued on one stream, and nothing waits: while a graph runs, the host launches the kernels of the
    chunks, and then the next step.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        sampler: Sampler,
        pool: Tensor,
        cache: KvCache,
        geometry: KvGeometry,
        max_position: int,
        vocab_size: int,
        graphs: DecodeGraphs | None,
        padded: PaddedPasses | None,
        passes: Passes,
    ) -> None:
        self.geometry = geometry
        self.num_blocks = pool.shape[0]
        self.pool = pool
        self.max_position = max_position
        self.vocab_size = vocab_size
        self._decoder = decoder
        self._device = pool.device
        self._graphs = graphs
        self._padded = padded
        self.merges_passes = passes.merges
        self.paced_steps = passes.paced_steps
        self.pads_passes = padded is not None
        self._block_table = BlockTable(cache)
        self._embeddings = EmbeddingLoader(self._device, decoder.media_width, decoder.dtype)
        self._sampler = sampler
        self.masks = None if sampler.masks is None else sampler.masks.values
        self.needs_grids = decoder.mrope is not None

    @torch.inference_mode()
    def launch(self, batch: Batch) -> TorchStep:
        """See :meth:`trtx.torch_engine.step.ModelRunner.launch`."""
        sequences = batch.sequences
        self._block_table.update(sequences)
        self._sampler.update(sequences)
        if self._decoder.mrope is not None:
            self._decoder.mrope.update(sequences)
        num_decodes = 0
        while num_decodes < len(sequences) and _is_decode(sequences[num_decodes]):
            num_decodes += 1
        merged = num_decodes if self.merges_passes and num_decodes < len(sequences) else 0
        decodes, others = sequences[: num_decodes - merged], sequences[num_decodes - merged :]
        step = TorchStep(len(sequences), masks=self._sampler.masks)
        if decodes:
            step.pending.append(partial(self._sample_decodes, *self._decode(decodes), decodes, step))
        if others:
            packed = PackedPass(others, merged)
            step.pending.append(partial(self._sample_chunks, *self._hidden(packed), packed, len(decodes), step))
        if self._device.type == "cuda":
            step.done = torch.cuda.Event()
        if not batch.is_guided:
            step.sample()
        return step

    def _decode(self, sequences: list[ScheduledSequence]) -> tuple[Tensor, Callable[[], Tensor]]:
        """Runs the decodes. Returns (logits [rows, vocab], a function that samples tokens [rows] from them)."""
        tokens = [sequence.new_token_ids[0] for sequence in sequences]
        positions = [sequence.start for sequence in sequences]
        slots = [sequence.slot for sequence in sequences]
        if self._graphs is not None and self._graphs.fits(len(sequences)):
            return self._graphs.replay(tokens, positions, slots), self._graphs.sample
        inputs = PassInputs(*_upload(tokens, positions, slots, self._device))
        inputs = replace(inputs, token_ids=self._sampler.fill(inputs.token_ids, inputs.slots))
        logits = self._decoder.logits(self._decoder.hidden(inputs))
        return logits, partial(self._sampler.sample, logits, inputs.slots, inputs.positions)

    def _sample_decodes(
        self, logits: Tensor, sample: Callable[[], Tensor], sequences: list[ScheduledSequence], step: TorchStep
    ) -> None:
        unmasked = self._sampler.unmasked(logits, sequences)
        collected = self._sampler.collect(logits, sample(), sequences, unmasked)
        step.parts.append((list(range(len(sequences))), collected))

    def _sample_chunks(self, hidden: Tensor, lasts: list[int], packed: PackedPass, first: int, step: TorchStep) -> None:
        """Samples from the chunks and collects their prompt logprobs in ``step``.

        ``hidden`` and ``lasts``: see :meth:`_hidden`. ``first``: place of the batch's first sequence in the step.
        """
        sequences = packed.sequences
        sampling = [index for index, sequence in enumerate(sequences) if sequence.samples]
        if sampling:
            last = [lasts[index] for index in sampling]
            those = [sequences[index] for index in sampling]
            positions = [sequence.start + len(sequence.new_token_ids) - 1 for sequence in those]
            rows, at, slots = _upload(last, positions, [sequence.slot for sequence in those], self._device)
            logits = self._decoder.logits(hidden[rows.long()])
            unmasked = self._sampler.unmasked(logits, those)
            collected = self._sampler.collect(logits, self._sampler.sample(logits, slots, at), those, unmasked)
            step.parts.append(([first + index for index in sampling], collected))
        for index, sequence in enumerate(sequences):
            count = sequence.sampling.prompt_logprobs
            if count is not None and index >= packed.num_decodes:
                end = packed.ends[index]
                ranked = self._prompt_logprobs(hidden[end - len(sequence.new_token_ids) : end], sequence, count)
                step.prompts.append((first + index, ranked))

    def _hidden(self, packed: PackedPass) -> tuple[Tensor, list[int]]:
        """Runs the forward of a mixed batch.

        Returns (hidden states ``[rows, hidden]``, each sequence's row of its last token).

        The rows are all tokens if the batch needs them.
        """
        if self._padded is not None and self.pads_passes and self._padded.fits(packed):
            return self._padded.hidden(packed)
        count = packed.num_decodes
        rotary = None if self._decoder.mrope is None else self._decoder.mrope.of_chunks(packed.sequences)
        spans = packed.spans(self._device)
        token_ids, positions, slots = _upload(packed.tokens, packed.positions, packed.slots, self._device)
        if count:
            token_ids[:count] = self._sampler.fill(token_ids[:count], slots[:count])
        lasts = packed.lasts
        inputs = PassInputs(
            token_ids, positions, slots, spans, count, media=tuple(packed.media), rotary=rotary,
            wanted=None if packed.needs_all else int32(lasts, self._device),
        )  # fmt: skip
        return self._decoder.hidden(inputs), lasts if packed.needs_all else list(range(len(lasts)))

    def _prompt_logprobs(self, hidden: Tensor, sequence: ScheduledSequence, count: int) -> list[RankedLogprobs]:
        """Logprobs of the prompt tokens that follow this chunk's tokens: row p of ``hidden`` predicts token p + 1."""
        following = sequence.prompt_token_ids[sequence.start + 1 : sequence.start + 1 + hidden.shape[0]]
        results: list[RankedLogprobs] = []
        for begin in range(0, len(following), _PROMPT_LOGPROB_ROWS):
            tokens = following[begin : begin + _PROMPT_LOGPROB_ROWS]
            logits = self._decoder.logits(hidden[begin : begin + len(tokens)])
            results.append(RankedLogprobs(logits, int32(tokens, self._device), [count] * len(tokens)))
        return results

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def load_embedding(self, shared: SharedTensor) -> StepEmbedding:
        """See :meth:`trtx.torch_engine.step.ModelRunner.load_embedding`."""
        return self._embeddings.load(shared)

    def device_memory_bytes(self) -> int:
        return device_memory_bytes(self._device)

    def close(self) -> None:
        """Frees CUDA graphs, weights and pool. The runner must not be used afterwards."""
        self.synchronize()
        self._embeddings.close()
        del self._graphs, self._padded, self._decoder, self._sampler, self._block_table, self.pool
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _is_decode(sequence: ScheduledSequence) -> bool:
    return bool(sequence.samples and sequence.start and len(sequence.new_token_ids) == 1 and not sequence.embeddings)


def _upload(
    tokens: list[int], positions: list[int], slots: list[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Uploads three lists of equal length in one copy."""
    first, second, third = int32(tokens + positions + slots, device).view(3, -1).unbind(0)
    return first, second, third
