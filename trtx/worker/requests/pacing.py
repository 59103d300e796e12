"""Sends fewer, larger chunks when chunks arrive faster than they can be passed on.

Each chunk crosses from Python to Dynamo's threads and back. That takes about 40 us of the GIL, which one thread has at
a time, plus the wake-up of the next thread. 256 streams with a token every 8 ms need more than all of that time. A
stream can measure how long its last chunk took until Dynamo requested the next one. If that took more than a
millisecond, other streams caused the delay, and this stream pauses for a multiple of it; meanwhile its tokens
accumulate. docs/performance-notes.md has the measured effect.
"""

from __future__ import annotations

UNHURRIED_SECONDS = 0.001
"""Delay up to which a stream does not pause; without contention, a chunk takes less than half of it."""
TIMES = 8
LONGEST_SECONDS = 0.05
"""Longest pause. If a frontend or a client does not read, waiting longer would not help the other streams."""
FEW_STREAMS = 16
"""Number of streams up to which none pauses: so few can't saturate the GIL, so any delay has another cause."""


def rest_seconds(passed_s: float, streams: int) -> float:
    """How long a stream pauses before its next chunk; 0.0 for no pause.

    ``passed_s`` is the time from the last chunk until Dynamo requested the next; ``streams`` is the number of open
    streams.
    """
    if streams <= FEW_STREAMS or passed_s <= UNHURRIED_SECONDS:
        return 0.0
    return min(TIMES * (passed_s - UNHURRIED_SECONDS), LONGEST_SECONDS)
