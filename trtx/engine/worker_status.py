"""What a worker says of itself in its status file: the one form of it, for the worker that writes it and the launcher.

The file is this dataclass as JSON. The types are those of its annotations, checked when it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from trtx.engine.ranks import Rank
from trtx.errors import LaunchError

State = Literal["loading", "serving", "draining"]


@dataclass(frozen=True, slots=True)
class HandoffsSoFar:
    """Of a decode worker since it began: requests that have ended."""

    read: int  # KV came
    recomputed: int  # none came that had to: the prompt was computed a second time
    whole: int  # no prefill worker had the request
    recomputed_from: str = ""  # the prefill worker of the last one that was recomputed; empty: it did not say its name
    because: str = ""  # why that was


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """``worker_id`` is the integer instance id; the worker's discovery records end in its hex form."""

    pid: int
    state: State = "loading"
    engine_pid: int | None = None
    worker_id: int | None = None
    device_memory_bytes: int | None = None  # None: the engine holds none, or has not said
    kv_blocks: int | None = None  # None: it has no pool, or does not say
    load_seconds: float | None = None
    ranks: tuple[Rank, ...] = ()  # processes of the engine, to end by pid where they outlive the worker
    error: str | None = None
    handoffs: HandoffsSoFar | None = None  # None: it is no decode worker, or its engine does not say
    schema: Literal[1] = 1  # another number with a field that is gone, or means something else


def to_json(status: WorkerStatus) -> bytes:
    return msgspec.json.encode(status) + b"\n"


def read(path: Path | None, pid: int) -> WorkerStatus | None:
    """The status of process ``pid``; None while it has not written one: an older process's file does not count.

    Raises LaunchError, naming file and field, for a file that is no worker's status.
    """
    try:
        status = msgspec.json.decode(path.read_bytes(), type=WorkerStatus) if path is not None else None
    except OSError:
        return None
    except msgspec.DecodeError as error:  # such as: Expected `int`, got `str` - at `$.kv_blocks`
        raise LaunchError(
            f"{path} is no status of a worker of this trtx ({error}); expected the file as the worker wrote it: let "
            "nothing else write there"
        ) from error
    return status if status is not None and status.pid == pid else None
