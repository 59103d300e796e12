"""Positions that media take in a prompt, for models that give each token three of them (time, height, width)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trtx.torch_engine.messages import MediaSpan


def step_positions(span: MediaSpan) -> npt.NDArray[np.int32]:
    """``[steps]``: time positions of the grid's steps, counted from the beginning of the span."""
    assert span.grid is not None, "see media_problem"
    # In float32, then truncated, as transformers computes it.
    return (np.arange(span.grid[0], dtype=np.float32) * np.float32(span.time_step)).astype(np.int32)


def extent(span: MediaSpan) -> int:
    """Number of positions that a span takes: its longest side of time, height and width. Text continues behind it."""
    assert span.grid is not None, "see media_problem"
    return max(int(step_positions(span)[-1]) + 1, *span.grid[1:])


def position_delta(spans: Sequence[MediaSpan]) -> int:
    """Difference between position and index of every token behind the last span, generated tokens included. Above 0
    where a video lasts longer than its prompt has tokens."""
    return sum(extent(span) - span.length for span in spans)


def stretch(spans: Sequence[MediaSpan]) -> int:
    """Positions that a prompt takes beyond its tokens; the answer may have so many tokens fewer. 0 without grids."""
    if any(span.grid is None for span in spans):
        return 0
    return max(0, position_delta(spans))
