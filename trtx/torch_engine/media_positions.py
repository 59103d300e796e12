"""Positions of media items in a prompt, for models with 3-D positions (time, height, width) for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trtx.torch_engine.messages import MediaSpan

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def step_positions(span: MediaSpan) -> npt.NDArray[np.int32]:
    """``[steps]``: time position of each time step of the grid, relative to the start of the placeholder range."""
    import numpy as np

    assert span.grid is not None, "see media_problem"
    # float32, then truncated: transformers computes it the same way.
    return (np.arange(span.grid[0], dtype=np.float32) * np.float32(span.time_step)).astype(np.int32)


def extent(span: MediaSpan) -> int:
    """Number of positions that a placeholder range takes: the longest of its time, height and width.

    Text continues after it.
    """
    assert span.grid is not None, "see media_problem"
    return max(int(step_positions(span)[-1]) + 1, *span.grid[1:])


def position_delta(spans: Sequence[MediaSpan]) -> int:
    """Position minus token index for every token after the last media item, generated tokens included.

    It is positive if a video has more time positions than the prompt has placeholders for it.
    """
    return sum(extent(span) - span.length for span in spans)


def stretch(spans: Sequence[MediaSpan]) -> int:
    """Number of positions by which a prompt exceeds its token count; the output limit shrinks by as many tokens.

    0 if a media item has no grid.
    """
    if any(span.grid is None for span in spans):
        return 0
    return max(0, position_delta(spans))
