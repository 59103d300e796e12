"""M-RoPE: three positions for each token (time, height, width), each rotating some of a head's pairs.

All three positions of a text token are equal. The KV cache's place of a token and the causal mask use its index in the
sequence, a single number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trtx.checkpoint.rope import RopeConfig
from trtx.torch_engine.media_positions import extent, position_delta, step_positions
from trtx.torch_engine.messages import MediaSpan
from trtx.torch_engine.runner.kernels import int32
from trtx.torch_engine.step import ScheduledSequence


def positions_between(spans: Sequence[MediaSpan], start: int, end: int) -> npt.NDArray[np.int32]:
    """Positions of tokens ``[start, end)`` of prompt and output: ``[3, end - start]``.

    An image or video starts where the text before it ends, and counts time, rows and columns from there. Text continues
    after its largest position, like in Qwen's training (``get_rope_index_25`` in their ``rope2d.py``), in transformers
    up to 5.2, in vLLM and in TensorRT-LLM. transformers 5.3 to 5.23 leave a video's time out of that largest position.
    """
    index = np.arange(start, end)
    found = np.broadcast_to(index, (3, end - start)).copy()
    shift = 0
    for span in spans:
        assert span.grid is not None, "see media_problem"
        if span.start >= end:
            break
        _, height, width = span.grid
        after = span.start + span.length
        if after > start:
            inside = (index >= span.start) & (index < after)
            row = index[inside] - span.start
            of_grid = step_positions(span)[row // (height * width)], row // width % height, row % width
            found[:, inside] = np.stack(of_grid) + span.start + shift
        shift += extent(span) - span.length
        found[:, index >= after] = index[index >= after] + shift
    return found.astype(np.int32)


class Mrope:
    """Rotary angles from three positions, and each slot's position offset for generated tokens."""

    def __init__(self, rope: RopeConfig, rotary: Tensor, max_batch_size: int) -> None:
        """``rotary``: :func:`trtx.torch_engine.runner.rope.rotary_table`.

        The last row of the offsets is the padding slot's.
        """
        self._rotary = rotary
        self._deltas = torch.zeros(max_batch_size + 1, dtype=torch.int32, device=rotary.device)
        axes = axis_of_pairs(rope, rotary.shape[1] // 2)
        self._axes = torch.tensor([*axes, *axes], device=rotary.device).unsqueeze(0).unsqueeze(0)  # cosines, then sines

    def update(self, sequences: list[ScheduledSequence]) -> None:
        """Enqueues one small copy of offsets for sequences that are new in their slot. Call it before the forward."""
        new = [sequence for sequence in sequences if sequence.is_first]
        if new:
            slots = [sequence.slot for sequence in new]
            deltas = [position_delta(sequence.media) for sequence in new]
            both = int32(slots + deltas, self._deltas.device)
            self._deltas[both[: len(new)].long()] = both[len(new) :]

    def of_decodes(self, positions: Tensor, slots: Tensor) -> Tensor:
        """Angles ``[n, head_dim]`` of a decode forward: cosines, then sines. Shapes are static, for a CUDA graph."""
        return self._rotary[(positions + self._deltas[slots.long()]).long()]

    def of_chunks(self, sequences: list[ScheduledSequence]) -> Tensor:
        """Angles of all chunks' tokens, concatenated, in the same form."""
        parts = [
            positions_between(sequence.media, sequence.start, sequence.start + len(sequence.new_token_ids))
            for sequence in sequences
        ]
        positions = np.concatenate(parts, axis=1)
        by_axis = int32(positions.reshape(-1).tolist(), self._rotary.device).view(3, -1)
        rows = self._rotary[by_axis.long()]  # [3, tokens, head_dim]
        return rows.gather(0, self._axes.expand(1, rows.shape[1], -1))[0]


def axis_of_pairs(rope: RopeConfig, pairs: int) -> list[int]:
    """For each of a head's pairs, the position that rotates it: 0 time, 1 height, 2 width."""
    assert rope.mrope_section is not None
    if not rope.mrope_interleaved:
        return [axis for axis, count in enumerate(rope.mrope_section) for _ in range(count)]
    found = [0] * pairs
    for axis in (1, 2):
        for pair in range(axis, 3 * rope.mrope_section[axis], 3):
            found[pair] = axis
    return found
