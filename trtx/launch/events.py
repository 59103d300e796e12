"""The events of a topology, which listeners such as the CLI show."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal[
    "starting",  # a process was started
    "up",  # the frontend listens; a worker has loaded and is registered
    "asleep",  # a worker has left routing because its engine sleeps or gets new weights; "up" follows
    "waiting",  # every process of this host is up, but other hosts' workers are missing
    "ready",  # the whole topology answered a real request
    "exited",  # a process died unexpectedly
    "vanished",  # a live worker's discovery records are gone, or a live frontend answers no request
    "lost",  # files that the topology needs or writes are gone
    "found",  # what was lost is back
    "recomputed",  # a decode worker computed prompts whose KV did not come from a prefill worker
    "unproved",  # every process is up again, but a real request fails
    "restarting",  # the process will be started again
    "held-back",  # the restart is delayed: the process could not start or not register now
    # every process is up again, and a real request and a KV transfer between each pair of workers succeeded
    "recovered",
    "gave-up",  # the topology shuts itself down
    "stopping",
    "stopped",
]


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    ``message`` is one line for the user; ``name`` is the process, or empty for the topology as a whole.
    """

    kind: EventKind
    message: str
    name: str = ""
    at: float = field(default_factory=time.time)  # seconds since the epoch
