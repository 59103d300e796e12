"""The model runner: launches the forwards of a scheduled batch."""

# torch leaves its events untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from trtx.config.torch_passes import MOST_SAMPLED_AFTER_DRAFTS
from trtx.ipc.shared_tensor import SharedTensor
from trtx.torch_engine.device import device_memory_bytes
from trtx.torch_engine.drafting import DraftModel
from trtx.torch_engine.kv_layout import KvGeometry
from trtx.torch_engine.messages import MemoryTag, SharedCopy
from trtx.torch_engine.runner.args import Passes
from trtx.torch_engine.runner.decoder import Decoder
from trtx.torch_engine.runner.embeddings import EmbeddingLoader
from trtx.torch_engine.runner.expert_load import ExpertLoad
from trtx.torch_engine.runner.graphs import DecodeGraphs
from trtx.torch_engine.runner.kernels import KvCache, PassInputs, int32
from trtx.torch_engine.runner.launched_step import SampledForward, TorchStep
from trtx.torch_engine.runner.logprobs import RankedLogprobs
from trtx.torch_engine.runner.packed_pass import PackedPass
from trtx.torch_engine.runner.padded_passes import PaddedPasses
from trtx.torch_engine.runner.runner_memory import NewWeights, RunnerMemory
from trtx.torch_engine.runner.sampler import Sampler
from trtx.torch_engine.runner.slots import BlockTable
from trtx.torch_engine.step import Batch, ExpertBalance, ScheduledSequence, StepEmbedding

_PROMPT_LOGPROB_ROWS = 256  # rows of float32 logits at once: 256 rows of 151,936 are 156 MB


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
        memory: RunnerMemory,
        load: ExpertLoad | None = None,
    ) -> None:
        self._load = load
        self.memory = memory
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
        self.is_asynchronous = pool.device.type == "cuda"
        self._graph_misses = 0
        self._most_rows = max(cache.padding_slot, MOST_SAMPLED_AFTER_DRAFTS)  # of logits at once
        self.block_table = BlockTable(cache)
        self._edit_stream = torch.cuda.Stream(pool.device) if self.is_asynchronous else None
        self._embeddings = EmbeddingLoader(self._device, decoder.media_width, decoder.dtype)
        self._sampler = sampler
        self.masks = None if sampler.masks is None else sampler.masks.values
        self.needs_grids = decoder.mrope is not None
        self.draft_model: DraftModel | None = None

    @property
    def graph_misses(self) -> int | None:
        """See :class:`trtx.torch_engine.step.ModelRunner`."""
        return None if self._graphs is None and self._padded is None else self._graph_misses

    @property
    def expert_balance(self) -> ExpertBalance | None:
        """See :class:`trtx.torch_engine.step.ModelRunner`."""
        return None if self._load is None else self._load.balance

    @property
    def shared_weights(self) -> SharedCopy | None:
        """See :class:`trtx.torch_engine.step.ModelRunner`."""
        shared = self.memory.shared_weights
        return None if shared is None else SharedCopy(shared.num_bytes, shared.mapped_from)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> TorchStep:
        """See :meth:`trtx.torch_engine.step.ModelRunner.launch`."""
        sequences = batch.sequences
        self.block_table.update(sequences)
        self._sampler.update(sequences)
        if self._decoder.mrope is not None:
            self._decoder.mrope.update(sequences)
        num_decodes = 0
        while num_decodes < len(sequences) and _is_decode(sequences[num_decodes]):
            num_decodes += 1
        # Guesses are few tokens: another forward would take nearly as long as the first.
        merges = self.merges_passes or any(sequence.num_drafts for sequence in sequences)
        merged = num_decodes if merges and num_decodes < len(sequences) else 0
        decodes, others = sequences[: num_decodes - merged], sequences[num_decodes - merged :]
        step = TorchStep(len(sequences), self._sampler, edits_on=self._edit_stream)
        if decodes:
            logits, sample = self._decode(decodes)
            step.forwards.append(SampledForward(logits, decodes, list(range(num_decodes - merged)), sample))
        if others:
            self._add_chunks(PackedPass(others, merged), len(decodes), step)
        if self._load is not None:
            step.read_load = self._load.read()
        if self.is_asynchronous:
            step.done = torch.cuda.Event()
        if not batch.waits_for_tokens:
            step.sample()
        return step

    def _decode(self, sequences: list[ScheduledSequence]) -> tuple[Tensor, Callable[[], Tensor]]:
        """Runs the decodes. Returns (logits [rows, vocab], a function that samples tokens [rows] from them)."""
        tokens = [sequence.new_token_ids[0] for sequence in sequences]
        positions = [sequence.start for sequence in sequences]
        slots = [sequence.slot for sequence in sequences]
        if self._graphs is not None:
            if self._graphs.fits(len(sequences)):
                return self._graphs.replay(tokens, positions, slots), self._graphs.sample
            self._graph_misses += 1
        inputs = PassInputs(*_upload(tokens, positions, slots, self._device))
        inputs = replace(inputs, token_ids=self._sampler.fill(inputs.token_ids, inputs.slots))
        logits = self._decoder.logits(self._decoder.hidden(inputs))
        return logits, partial(self._sampler.sample, logits, inputs.slots, inputs.positions)

    def _add_chunks(self, packed: PackedPass, first: int, step: TorchStep) -> None:
        """Runs a mixed batch, and adds to ``step`` the rows to sample and the prompt logprobs.

        ``first``: place of the batch's first sequence in the step.
        """
        hidden, firsts = self._hidden(packed)
        sequences = packed.sequences
        sampling = [index for index, sequence in enumerate(sequences) if sequence.samples]
        most_drafts = max((sequences[index].num_drafts for index in sampling), default=-1)
        rows = [
            _RowsAfter(place, [index for index in sampling if sequences[index].num_drafts >= place])
            for place in range(most_drafts + 1)
        ]
        for together in _at_most(self._most_rows, rows):
            self._add_rows(packed, hidden, firsts, together, first, step)
        for index, sequence in enumerate(sequences):
            count = sequence.sampling.prompt_logprobs
            if count is not None and index >= packed.num_decodes:
                end = packed.ends[index]
                ranked = self._prompt_logprobs(hidden[end - len(sequence.new_token_ids) : end], sequence, count)
                step.prompts.append((first + index, ranked))

    def _add_rows(
        self,
        packed: PackedPass,
        hidden: Tensor,
        firsts: list[int],
        together: list[_RowsAfter],
        first: int,
        step: TorchStep,
    ) -> None:
        """Computes the logits of rows with one matmul, and adds them to ``step``.

        Rows after the same number of guesses are sampled together, as penalties of a row count the tokens before it.
        """
        sequences = packed.sequences
        at = [(firsts[index] + one.place, index, one.place) for one in together for index in one.indices]
        rows, positions, slots = _upload(
            [row for row, _, _ in at],
            [_first_position(sequences[index]) + place for _, index, place in at],
            [sequences[index].slot for _, index, _ in at],
            self._device,
        )
        logits = self._decoder.logits(hidden[rows.long()])
        begin = 0
        for one in together:
            part = slice(begin, begin := begin + len(one.indices))
            sample = partial(self._sampler.sample, logits[part], slots[part], positions[part], place=one.place)
            those = [sequences[index] for index in one.indices]
            places = [first + index for index in one.indices]
            step.forwards.append(SampledForward(logits[part], those, places, sample, place=one.place))

    def _hidden(self, packed: PackedPass) -> tuple[Tensor, list[int]]:
        """Runs the forward of a mixed batch.

        Returns (hidden states ``[rows, hidden]``, for each sequence the row of the first token that is sampled after).
        The rows of its guesses follow.

        The rows are all tokens if the batch needs them.
        """
        if self._padded is not None and self.pads_passes:
            if self._padded.fits(packed):
                return self._padded.hidden(packed)
            self._graph_misses += 1
        count = packed.num_decodes
        rotary = None if self._decoder.mrope is None else self._decoder.mrope.of_chunks(packed.sequences)
        spans = packed.spans(self._device)
        token_ids, positions, slots = _upload(packed.tokens, packed.positions, packed.slots, self._device)
        if count:
            token_ids[:count] = self._sampler.fill(token_ids[:count], slots[:count])
        inputs = PassInputs(
            token_ids, positions, slots, spans, count, media=tuple(packed.media), rotary=rotary,
            wanted=None if packed.needs_all else int32(packed.wanted, self._device),
        )  # fmt: skip
        firsts = packed.firsts
        if not packed.needs_all:
            sizes = [1 + sequence.num_drafts for sequence in packed.sequences]
            firsts = [end - size for size, end in zip(sizes, accumulate(sizes), strict=True)]
        return self._decoder.hidden(inputs), firsts

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

    def release(self, tags: Collection[MemoryTag]) -> None:
        """See :meth:`trtx.torch_engine.step.ModelRunner.release`."""
        self.synchronize()
        self.memory.release(tags)

    def restore(self, tags: Collection[MemoryTag]) -> None:
        """See :meth:`trtx.torch_engine.step.ModelRunner.restore`."""
        self.memory.restore(tags)
        self._name_scales()

    def update_weights(self, model_dir: Path) -> None:
        """See :meth:`trtx.torch_engine.step.ModelRunner.update_weights`."""
        self.replace_weights(self.memory.read_weights(model_dir))

    def replace_weights(self, new: NewWeights) -> None:
        """The second half of :meth:`update_weights`: after it, ``new`` of :attr:`memory` are the weights."""
        self.synchronize()
        self.memory.replace_weights(new)
        self._name_scales()

    def _name_scales(self) -> None:
        """Updates the name of a float8 pool's scales, which engines compare before a handoff."""
        if self.geometry.scales and (scales := self.memory.kv_scales) is not None:
            self.geometry = replace(self.geometry, scales=scales_name(scales))

    def device_memory_bytes(self) -> int:
        return device_memory_bytes(self._device)

    def close(self) -> None:
        """Frees CUDA graphs, weights and pool. The runner must not be used afterwards."""
        self.synchronize()
        self._embeddings.close()
        self.draft_model = None
        del self._graphs, self._padded, self._decoder, self._sampler, self.block_table, self.pool
        self.memory.close()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def scales_name(scales: Tensor) -> str:
    """Short digest of the scales of a float8 pool."""
    return blake2b(scales.cpu().numpy().tobytes(), digest_size=4).hexdigest()


@dataclass(frozen=True, slots=True)
class _RowsAfter:
    """The rows that are sampled after ``place`` guesses, of the sequences ``indices`` of a packed batch."""

    place: int
    indices: list[int]


def _at_most(most_rows: int, rows: list[_RowsAfter]) -> Iterator[list[_RowsAfter]]:
    """Splits into parts of at most ``most_rows`` rows, so that the logits of a step have a bounded size."""
    part: list[_RowsAfter] = []
    for one in rows:
        if part and sum(len(other.indices) for other in part) + len(one.indices) > most_rows:
            yield part
            part = []
        part.append(one)
    if part:
        yield part


def _first_position(sequence: ScheduledSequence) -> int:
    """Position of the first token that is sampled after."""
    return sequence.start + len(sequence.new_token_ids) - 1 - sequence.num_drafts


def _is_decode(sequence: ScheduledSequence) -> bool:
    return bool(sequence.samples and sequence.start and len(sequence.new_token_ids) == 1 and not sequence.embeddings)


def _upload(
    tokens: list[int], positions: list[int], slots: list[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Uploads three lists of equal length in one copy."""
    first, second, third = int32(tokens + positions + slots, device).view(3, -1).unbind(0)
    return first, second, third
