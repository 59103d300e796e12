"""The run's journal: what happened, one JSON object a line, only ever appended to. Each kind of event is a class."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from trtx.bench.cells import CellStatus
from trtx.bench.digests import FileDigest
from trtx.bench.documents import RESTORE, Document, parsed
from trtx.config.wording import quoted
from trtx.errors import UsageError

JOURNAL = Document(
    "journal.jsonl", version=2, oldest=2, since="a sweep was one call of aiperf, and a topology was called by its mode"
)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened, now. Its name in the journal is its class's: ``sweep_started``."""

    time: float = field(default_factory=lambda: round(time.time(), 3))  # s since 1970, UTC

    @classmethod
    def name(cls) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


@dataclass(frozen=True, kw_only=True)
class TopologyReady(Event):
    topology: str
    load_seconds: float
    warm_up_seconds: float


@dataclass(frozen=True, kw_only=True)
class ProcessRestart:
    """Of one process, while it was measured."""

    name: str
    at: float
    exit: str


@dataclass(frozen=True, kw_only=True)
class TopologyStopping(Event):
    topology: str
    restarts: tuple[ProcessRestart, ...]


@dataclass(frozen=True, kw_only=True)
class WorkerKilled(Event):
    """By the run itself, which asks what becomes of its streams."""

    topology: str
    worker: str
    open_requests: int


@dataclass(frozen=True, kw_only=True)
class SweepStarted(Event):
    topology: str
    model: str
    cells: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LoadStarted(Event):
    session: int  # of the process that has aiperf imported
    scratch: str  # TMPDIR of it and of all that it starts


@dataclass(frozen=True, kw_only=True)
class TrialStarted(Event):
    cell: str
    trial: int
    argv: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TrialLengthened(Event):
    """Its warm-up was not steady when it ended: it is made again with a longer one."""

    cell: str
    trial: int
    warmup_request_count: int  # of the next
    why: str


@dataclass(frozen=True, kw_only=True)
class TrialEnded(Event):
    cell: str
    trial: int
    aiperf_exit_code: int | None  # None: it was ended
    restarted: tuple[str, ...] | None  # processes of the topology, meanwhile; None: nobody watched them
    files: dict[str, FileDigest] | None = None  # that its cell follows from, by name; None: nobody looked


@dataclass(frozen=True, kw_only=True)
class CellWritten(Event):
    """Its file is about to be replaced at once by one with this digest."""

    cell: str
    file: FileDigest


@dataclass(frozen=True, kw_only=True)
class CellEnded(Event):
    cell: str
    status: CellStatus
    failure: str | None


@dataclass(frozen=True, kw_only=True)
class SweepEnded(Event):
    topology: str


@dataclass(frozen=True, kw_only=True)
class RunResumed(Event):
    command: str
    kept: tuple[str, ...]
    missing: tuple[str, ...]
    changed: tuple[str, ...] = ()  # files of missing trials that are others than as they ended, a sentence each


@dataclass(frozen=True, kw_only=True)
class RunFailed(Event):
    error: str
    files: dict[str, FileDigest] | None = None  # as those of RunEnded


@dataclass(frozen=True, kw_only=True)
class RunEnded(Event):
    files: dict[str, FileDigest] | None = None  # by path within the run directory; None: an older run, which noted none


class Journal:
    """Appends to ``journal.jsonl``. Each line reaches the disk before :meth:`note` returns."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / JOURNAL.file

    def note(self, event: Event) -> None:
        """One line. Raises OSError, and leaves no part of it, where it can't be written."""
        fields = asdict(event)
        line = json.dumps(JOURNAL.versioned({"time": fields.pop("time"), "event": event.name(), **fields}))
        # O_APPEND and one write: lines of two writers never mix, and a killed run leaves whole lines.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            data = (line + "\n").encode()
            if (written := os.write(descriptor, data)) < len(data):  # the disk is full: the next line begins its own
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def mend(self) -> None:
        """Cuts off a last line that a full disk cut short, so that the next one begins a line of its own."""
        if self.path.exists() and not (text := self.path.read_bytes()).endswith(b"\n"):
            os.truncate(self.path, text.rfind(b"\n") + 1)


def read_journal(run_dir: Path) -> tuple[Event, ...]:
    """The events so far, in order; none when nothing was noted yet. A last line cut short is left out.

    Raises UsageError naming the line, and the field, that can't be read.
    """
    path = run_dir / JOURNAL.file
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").split("\n")
    return tuple(_event(line, f"{path}, line {number}") for number, line in enumerate(lines[:-1], start=1) if line)


def _event(line: str, source: str) -> Event:
    try:
        document = parsed(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source} is not JSON ({error}); {RESTORE}") from error
    fields = JOURNAL.checked(document, source)
    if "time" not in fields:  # which a new event has by itself
        raise UsageError(f"{source}: time is missing; expected it; {RESTORE}")
    kinds = {kind.name(): kind for kind in Event.__subclasses__()}
    name = fields.get("event")
    if not isinstance(name, str) or name not in kinds:
        raise UsageError(f"{source}: event is {quoted(name)}; expected one of {', '.join(kinds)}; {RESTORE}")
    return JOURNAL.restored(fields, kinds[name], source)
