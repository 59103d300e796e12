"""What the files of a run directory were as they were written: size and SHA-256 of each, kept in the journal.

Three events hold them. A trial's end has the files that its cell follows from; a cell has its own as it is written; the
end of a run has all others. A file that none of them has is in :data:`NOT_COVERED`, with the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from trtx.bench.readings import READINGS
from trtx.bench.records import RECORDS_FILE

# Figures follow from aiperf's records, checks also from its log and from what was read of the server.
FOLLOWED = (RECORDS_FILE, "logs/aiperf.log", READINGS.file)
_CELLS = "cells"
_OF_PROCESSES = "written by a process while it ran; nothing is read of it afterwards"
_RENDERED = "made of the other files, and made again by trtx report"
NOT_COVERED: Mapping[str, str] = {
    "journal.jsonl": "it holds the digests themselves",
    **dict.fromkeys(("report.html", "summary.json", "summary.csv", "summary.md", "junit.xml"), _RENDERED),
    "attempts/*": "set aside by a resumption, and read no more",
    "cells/*/trial-*": "aiperf's own files beside those that figures follow from; nothing is read of them afterwards",
    "load/*": _OF_PROCESSES,
    "*.log": _OF_PROCESSES,
    "*/serve/*": _OF_PROCESSES,
    **dict.fromkeys((".*", "*/.*"), "a part of a file that was being written as the run was killed"),
}
"""Patterns of paths within a run directory (``*`` matches ``/`` too) -> why no digest is kept. The files of a trial
that figures follow from, and ``cell.json``, are covered all the same, by events of their own."""


@dataclass(frozen=True, slots=True)
class FileDigest:
    bytes: int
    sha256: str


def digest_of_text(text: str) -> FileDigest:
    """Of a file that will hold it, in UTF-8."""
    content = text.encode()
    return FileDigest(len(content), hashlib.sha256(content).hexdigest())


def digests_of(directory: Path, names: Iterable[str] = FOLLOWED) -> dict[str, FileDigest]:
    """By name within ``directory``; a file that is not there, or can't be read, is left out."""
    return {name: found for name in names if (found := _digest(directory / name)) is not None}


def documents_of(run_dir: Path) -> tuple[str, ...]:
    """Paths within a run directory of all files that the end of the run notes."""
    names = (path.relative_to(run_dir).as_posix() for path in sorted(run_dir.rglob("*")) if path.is_file())
    return tuple(name for name in names if why_not_noted(name) is None)


def why_not_noted(name: str) -> str | None:
    """Why the end of a run notes no digest of a file; None: it notes one."""
    if name.startswith(f"{_CELLS}/") and name.count("/") == 2:
        return None if not name.endswith("/cell.json") else "its cell notes one as it is written"
    return next((why for pattern, why in NOT_COVERED.items() if fnmatchcase(name, pattern)), None)


@dataclass(frozen=True, slots=True)
class Changes:
    """What became of files since their digests were noted."""

    changed: tuple[str, ...] = ()  # a sentence each, without its full stop
    gone: tuple[str, ...] = ()  # names: they are not there, or can't be read


def changes_since(trial: Path, then: Mapping[str, FileDigest]) -> Changes:
    """Reads every file of a trial that was there as it ended."""
    return changes_in(trial, then, "the trial ended", prefix=f"{trial.name}/")


def changes_in(directory: Path, then: Mapping[str, FileDigest], moment: str, *, prefix: str = "") -> Changes:
    """Reads every file of ``then``, by its name in ``directory``. ``prefix``: of the names that are told."""
    changed, gone = [], []
    for name, before in then.items():
        now, shown = _digest(directory / name), f"{prefix}{name}"
        if now is None:
            gone.append(shown)
        elif now.bytes != before.bytes:
            changed.append(f"{shown} has {now.bytes:,} bytes, and had {before.bytes:,} as {moment}")
        elif now != before:
            changed.append(f"{shown} holds something else than as {moment}")
    return Changes(tuple(changed), tuple(gone))


def _digest(path: Path) -> FileDigest | None:
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return FileDigest(file.tell(), sha256)
    except OSError:
        return None
