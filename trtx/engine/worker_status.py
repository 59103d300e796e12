"""The contents of a worker's status file; the format for both the worker, which writes it, and the launcher.

The file is this dataclass as JSON. Reading checks the types against the annotations.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from trtx.engine.ranks import Rank
from trtx.errors import LaunchError

State = Literal["loading", "serving", "asleep", "draining"]
"""``asleep``: out of routing, because its engine sleeps, is about to, or gets new weights."""


@dataclass(frozen=True, slots=True)
class HandoffsSoFar:
    """A decode worker's finished requests since its start, by handoff outcome."""

    read: int  # KV arrived
    recomputed: int  # KV did not arrive, so the prompt was computed a second time
    whole: int  # requests that no prefill worker had, though one should have had them
    recomputed_from: str = ""  # prefill worker of the last recomputed request; empty: it did not give its name
    because: str = ""  # why it was recomputed
    local: int = 0  # prompts that the router left to this worker (``--conditional-disagg``)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's status.

    ``worker_id`` is the integer instance id; the names of its discovery records end in its hex form.
    """

    pid: int
    state: State = "loading"
    engine_pid: int | None = None
    worker_id: int | None = None
    device_memory_bytes: int | None = None  # None: the engine uses none, or has not reported it
    kv_blocks: int | None = None  # None: the engine has no KV pool, or does not report it
    load_seconds: float | None = None
    ranks: tuple[Rank, ...] = ()  # the engine's processes, to be killed by pid if they outlive the worker
    error: str | None = None
    handoffs: HandoffsSoFar | None = None  # None: not a decode worker, or its engine does not report transfers
    schema: Literal[1] = 1  # rises when a field is removed or changes its meaning


def requests_file(status_file: Path) -> Path:
    """The file in which a worker writes one row per ended request (``trtx.worker.requests.stage_log``)."""
    return status_file.with_suffix(".requests.jsonl")


def to_json(status: WorkerStatus) -> bytes:
    return msgspec.json.encode(status) + b"\n"


def read(path: Path | None, pid: int) -> WorkerStatus | None:
    """Reads the status of process ``pid``. None if there is none yet; a file of an earlier process is ignored.

    Raises LaunchError, with file and field, for a file that is not a valid status.
    """
    try:
        status = msgspec.json.decode(path.read_bytes(), type=WorkerStatus) if path is not None else None
    except OSError:
        return None
    except msgspec.DecodeError as error:  # for example: Expected `int`, got `str` - at `$.kv_blocks`
        raise LaunchError(
            f"{path} is not a status of a worker of this trtx ({error}); expected the file as the worker wrote it: let "
            "nothing else write there"
        ) from error
    return status if status is not None and status.pid == pid else None


# The first use of this type happens here, in the importing thread: see trtx.torch_engine.llm_args.
msgspec.json.Decoder(WorkerStatus)
