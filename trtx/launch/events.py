"""What happens to a topology, one value at a time, for whoever shows it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal[
    "starting",  # a process was started
    "serving",  # a worker says that it serves
    "ready",  # the whole topology answered a real request
    "exited",  # a process died that should not have
    "vanished",  # a live worker's discovery records are gone
    "restarting",  # it will be started again
    "recovered",  # every process is up and routable again
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
