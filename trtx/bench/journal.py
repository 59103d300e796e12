"""The run's journal: what happened, one JSON object a line, only ever appended to."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
JOURNAL_FILE = "journal.jsonl"


class Journal:
    """Appends to ``journal.jsonl``. Each line reaches the disk before :meth:`note` returns."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / JOURNAL_FILE

    def note(self, event: str, **fields: Any) -> None:
        """One line: schema version, time in s since 1970 (UTC), event, and its own fields. Raises OSError, and leaves
        no part of it, where it can't be written."""
        line = json.dumps({"schema_version": SCHEMA_VERSION, "time": round(time.time(), 3), "event": event, **fields})
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


def read_journal(run_dir: Path) -> tuple[dict[str, Any], ...]:
    """The events so far, in order; none when nothing was noted yet. A last line cut short is left out."""
    path = run_dir / JOURNAL_FILE
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").split("\n")
    return tuple(json.loads(line) for line in lines[:-1] if line)
