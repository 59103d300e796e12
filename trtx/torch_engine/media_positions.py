"""Where media take a prompt's positions, of models that count three of them (time, height, width) for a token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trtx.torch_engine.messages import MediaSpan


def step_positions(span: MediaSpan) -> npt.NDArray[np.int32]:
    """``[steps]``: how far each step of the span's grid is in time, counted from its beginning."""
    assert span.grid is not None, "see media_problem"
    # As transformers 5.23 computes it: in float32, cut off.
    return (np.arange(span.grid[0], dtype=np.float32) * np.float32(span.time_step)).astype(np.int32)


def lasts(spans: Sequence[MediaSpan]) -> bool:
    """Whether text behind media may have other positions than what is generated: with a video in one span."""
    return any(span.grid is not None and span.grid[0] > 1 for span in spans)


def extent(span: MediaSpan) -> int:
    """Positions from a span's beginning to one behind its largest, in whatever direction that is."""
    assert span.grid is not None, "see media_problem"
    return max(int(np.float32(span.grid[0] - 1) * np.float32(span.time_step)) + 1, *span.grid[1:])


def position_delta(spans: Sequence[MediaSpan], length: int) -> int:
    """What is added to the place of a token that is generated behind a prompt of ``length`` to get its position. Above
    0 where a video plays for longer than its prompt has tokens."""
    shift = largest = after = 0
    for span in spans:
        assert span.grid is not None, "see media_problem"
        largest = max(largest, span.start + shift + extent(span))
        shift += max(span.grid[1:]) - span.length
        after = span.start + span.length
    return delta_behind(largest, after, shift, length)


def answer_shift(spans: Sequence[MediaSpan], length: int) -> int:
    """How much further a generated token is than the same token as text of a longer prompt: 0 but for videos that last
    longer than their rows and columns are wide."""
    text = sum(max(span.grid[1:]) - span.length for span in spans if span.grid is not None)
    return position_delta(spans, length) - text if lasts(spans) else 0


def delta_behind(largest: int, after: int, shift: int, length: int) -> int:
    """``largest``: one behind the largest position of media, which end at ``after``; text there is shifted."""
    return max(largest, length + shift if after < length else 0) - length


def stretch(spans: Sequence[MediaSpan], length: int) -> int:
    """Positions that a prompt takes beyond its tokens: so many fewer may be generated. 0 for spans without grids."""
    if any(span.grid is None for span in spans):
        return 0
    return max(0, position_delta(spans, length))
