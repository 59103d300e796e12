"""The run's journal: append-only, one JSON object per line. Each kind of event is a class."""

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
from trtx.bench.documents import RESTORE, DocumentKind, parsed
from trtx.config.wording import quoted
from trtx.errors import UsageError

JOURNAL = DocumentKind(
    "journal.jsonl", version=2, oldest=2, since="a sweep was one call of aiperf, and a topology was called by its mode"
)


@dataclass(frozen=True, kw_only=True)
class JournalEvent:
    """Something that happened at the time of creation. Its name in the journal is the class name: ``sweep_started``."""

    time: float = field(default_factory=lambda: round(time.time(), 3))  # seconds since 1970, UTC

    @classmethod
    def name(cls) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


@dataclass(frozen=True, kw_only=True)
class TopologyReady(JournalEvent):
    topology: str
    load_seconds: float
    warm_up_seconds: float


@dataclass(frozen=True, kw_only=True)
class ProcessRestart:
    """The restart of one process during a measurement."""

    name: str
    at: float
    exit: str


@dataclass(frozen=True, kw_only=True)
class TopologyStopping(JournalEvent):
    topology: str
    restarts: tuple[ProcessRestart, ...]


@dataclass(frozen=True, kw_only=True)
class WorkerKilled(JournalEvent):
    """The run itself killed the worker, to test what happens to its streams."""

    topology: str
    worker: str
    open_requests: int


@dataclass(frozen=True, kw_only=True)
class SweepStarted(JournalEvent):
    topology: str
    model: str
    cells: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LoadStarted(JournalEvent):
    session: int  # session id of the aiperf host process
    scratch: str  # TMPDIR of the host and of every process it starts


@dataclass(frozen=True, kw_only=True)
class TrialStarted(JournalEvent):
    cell: str
    trial: int
    argv: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TrialLengthened(JournalEvent):
    """The warm-up wasn't steady when it ended, so the trial is repeated with a longer one."""

    cell: str
    trial: int
    warmup_request_count: int  # of the repeated trial
    why: str


@dataclass(frozen=True, kw_only=True)
class TrialEnded(JournalEvent):
    cell: str
    trial: int
    aiperf_exit_code: int | None  # None: aiperf was killed
    restarted: tuple[str, ...] | None  # processes of the topology restarted during the trial; None: not supervised
    files: dict[str, FileDigest] | None = None  # files the cell is computed from, by name; None: not recorded


@dataclass(frozen=True, kw_only=True)
class CellWritten(JournalEvent):
    """The cell's file is about to be replaced atomically by one with this digest."""

    cell: str
    file: FileDigest


@dataclass(frozen=True, kw_only=True)
class CellEnded(JournalEvent):
    cell: str
    status: CellStatus
    failure: str | None


@dataclass(frozen=True, kw_only=True)
class SweepEnded(JournalEvent):
    topology: str


@dataclass(frozen=True, kw_only=True)
class RunResumed(JournalEvent):
    command: str
    kept: tuple[str, ...]
    missing: tuple[str, ...]
    changed: tuple[str, ...] = ()  # changed files of missing trials, a sentence each


@dataclass(frozen=True, kw_only=True)
class RunFailed(JournalEvent):
    error: str
    files: dict[str, FileDigest] | None = None  # like RunEnded.files


@dataclass(frozen=True, kw_only=True)
class RunEnded(JournalEvent):
    files: dict[str, FileDigest] | None = None  # by path within the run directory; None: an older run without digests


class Journal:
    """Appends to ``journal.jsonl``. Each line is synced to disk before :meth:`note` returns."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / JOURNAL.file

    def note(self, event: JournalEvent) -> None:
        """Appends one event as one line. Raises OSError, and leaves no partial line, if it can't be written."""
        fields = asdict(event)
        line = json.dumps(JOURNAL.versioned({"time": fields.pop("time"), "event": event.name(), **fields}))
        # O_APPEND and a single write: lines of two writers never mix, and a killed run leaves whole lines.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            data = (line + "\n").encode()
            if (written := os.write(descriptor, data)) < len(data):  # disk full: remove the partial line
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def mend(self) -> None:
        """Removes a partial last line left by a full disk, so that the next event starts a new line."""
        if self.path.exists() and not (text := self.path.read_bytes()).endswith(b"\n"):
            os.truncate(self.path, text.rfind(b"\n") + 1)


def read_journal(run_dir: Path) -> tuple[JournalEvent, ...]:
    """All events so far, in order; empty if there is no journal. A partial last line is ignored.

    Raises UsageError that names the line and the field that can't be read.
    """
    path = run_dir / JOURNAL.file
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").split("\n")
    return tuple(_event(line, f"{path}, line {number}") for number, line in enumerate(lines[:-1], start=1) if line)


def _event(line: str, source: str) -> JournalEvent:
    try:
        document = parsed(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source} is not JSON ({error}); {RESTORE}") from error
    fields = JOURNAL.checked(document, source)
    if "time" not in fields:  # a new event would default to the current time
        raise UsageError(f"{source}: time is missing; expected it; {RESTORE}")
    kinds = {kind.name(): kind for kind in JournalEvent.__subclasses__()}
    name = fields.get("event")
    if not isinstance(name, str) or name not in kinds:
        raise UsageError(f"{source}: event is {quoted(name)}; expected one of {', '.join(kinds)}; {RESTORE}")
    return JOURNAL.restored(fields, kinds[name], source)
