"""What workers wrote about ended requests during a trial: one row per request and worker, and their CPU time.

The process that serves the topology copies the workers' rows into the trial's directory, next to aiperf's files. An
unknown value is None.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from trtx.bench.documents import RESTORE
from trtx.bench.files import write_text
from trtx.errors import UsageError

STAGES_FILE = "stages.jsonl"
"""One JSON object per line, as a worker wrote it: a request if it has ``id``, else a worker's use of cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One request on one worker; times in seconds. ``submitted_s`` and the chunks' times count from ``arrived_ns``."""

    id: str
    worker: str
    role: str
    outcome: str
    arrived_ns: int  # ns since 1970
    ended_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int | None = None
    chunks: int | None = None
    media_s: float | None = None
    submitted_s: float | None = None  # the engine had it
    first_chunk_s: float | None = None
    last_chunk_s: float | None = None
    token_s: float | None = None  # the engine had its first token; None: known only by first_chunk_s
    held_s: float | None = None  # chunks that waited for the frontend
    rested_s: float | None = None  # pauses between chunks
    queue_s: float | None = None
    prefill_s: float | None = None
    read_s: float | None = None  # KV from a prefill worker
    first_step_s: float | None = None
    decode_s: float | None = None
    prefill_wait_s: float | None = None  # part of prefill_s in which the engine waited for its device
    device_wait_s: float | None = None  # the same part of decode_s

    @property
    def answered_s(self) -> float | None:
        """When the first token existed, as exactly as it is known."""
        return self.first_chunk_s if self.token_s is None else self.token_s

    @property
    def computed_tokens(self) -> int | None:
        """Prompt tokens that the worker computed."""
        return None if self.prompt_tokens is None else self.prompt_tokens - (self.cached_tokens or 0)

    @property
    def prefill_span_ns(self) -> tuple[float, float] | None:
        """When the engine computed the prompt."""
        if self.submitted_s is None or self.queue_s is None or self.prefill_s is None:
            return None
        began = self.arrived_ns + (self.submitted_s + self.queue_s) * 1e9
        return began, began + self.prefill_s * 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUse:
    """CPU time of a worker and its engine since their start, and the number of cores that they may use."""

    worker: str
    at_ns: int
    cores: int
    cpu_s: float
    waited_s: float | None = None  # their threads were ready to run and had no core; None: not counted


@dataclass(frozen=True, slots=True)
class WorkerRows:
    """The content of the file."""

    requests: tuple[StageRow, ...]
    uses: tuple[WorkerUse, ...]


def write_rows(directory: Path, lines: Iterable[str]) -> None:
    """Writes the workers' lines of one trial. Raises OSError."""
    write_text(directory / STAGES_FILE, "".join(f"{line}\n" for line in lines))


def read_rows(directory: Path) -> WorkerRows | None:
    """The rows of one trial; None if there are none. Raises UsageError that names the file and the line."""
    path = directory / STAGES_FILE
    if not path.exists():
        return None
    requests, uses = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            if "id" in row:
                requests.append(_restored(StageRow, row))
            else:
                uses.append(_restored(WorkerUse, row))
        except (TypeError, ValueError) as error:
            raise UsageError(f"{path} line {number} is not a row of a worker ({error}); {RESTORE}") from error
    return WorkerRows(tuple(requests), tuple(uses))


T = TypeVar("T", StageRow, WorkerUse)


def _restored(form: type[T], row: dict[str, Any]) -> T:
    """Builds a row. Fields that a later version added are left out."""
    known = {one.name: str(one.type) for one in fields(form)}
    for name, value in row.items():
        kind = str if known.get(name) == "str" else (int, float)
        if name in known and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ValueError(f"{name} is {json.dumps(value)}")
    return form(**{name: value for name, value in row.items() if name in known})
