"""What happens to a topology, one value at a time, for whoever shows it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal[
    "starting",  # a process was started
    "up",  # the frontend listens; a worker has loaded and is registered
    "waiting",  # every process here is up, and other hosts lack some
    "ready",  # the whole topology answered a real request
    "exited",  # a process died that should not have
    "vanished",  # a live worker's discovery records are gone, or a live frontend answers nobody
    "lost",  # files that the topology needs or writes are gone
    "found",  # what was lost is there again
    "recomputed",  # a decode worker computed prompts whose KV did not come from a prefill worker
    "unproved",  # everything is up again, and a real request fails
    "restarting",  # it will be started again
    "held-back",  # not yet: it could not begin, or not register
    "recovered",  # every process is up again, a real request went through, and KV between each pair of workers
    "gave-up",  # the topology ends by itself
    "stopping",
    "stopped",
]


@dataclass(frozen=True, slots=True)
class Event:
    """``message`` is one line for a person; ``name`` is the process, or empty for the topology as a whole."""

    kind: EventKind
    message: str
    name: str = ""
    at: float = field(default_factory=time.time)  # seconds since the epoch
