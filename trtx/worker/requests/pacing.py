"""Larger chunks in place of a longer queue, where chunks come faster than they can be passed on.

Each chunk crosses from Python to the threads of Dynamo and back: some 40 us of the interpreter, which one thread has at
a time, and some more until the next one wakes up to it. 256 streams whose tokens come each 8 ms ask for more than all
of that. What a stream can tell is how long its last chunk took until Dynamo asked for the next. Beyond a millisecond
the others are to blame, and it waits a multiple of that before it has something to pass on again; its tokens add up.
docs/performance-notes.md has what that is worth.
"""

from __future__ import annotations

UNHURRIED_SECONDS = 0.001
"""A chunk takes less than half of it where nothing else is to do."""
TIMES = 8
LONGEST_SECONDS = 0.05
"""Where a frontend or a client does not read, more waiting would be no help to others."""
FEW_STREAMS = 16
"""As many cannot be too many: what holds their chunks up is another's doing."""


def rest_seconds(passed_s: float, streams: int) -> float:
    """How long a stream waits before its next chunk, whose last one was asked for ``passed_s`` after it was there.
    0.0: not at all. ``streams``: that are open."""
    if streams <= FEW_STREAMS or passed_s <= UNHURRIED_SECONDS:
        return 0.0
    return min(TIMES * (passed_s - UNHURRIED_SECONDS), LONGEST_SECONDS)
