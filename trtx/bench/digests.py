"""Size and SHA-256 of the files in a run directory at the time they were written, kept in the journal.

Three journal events hold digests: the end of a trial (the files from which its cell is computed), a cell
(``cell.json``), and the end of a run (all other files). :data:`NOT_COVERED` lists the files without a digest, with the
reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from trtx.bench.readings import READINGS
from trtx.bench.records import RECORDS_FILE
from trtx.bench.stage_rows import STAGES_FILE

# Metrics are computed from aiperf's records; checks also use its log and the server readings,
# and explanations use the workers' rows.
FOLLOWED = (RECORDS_FILE, "logs/aiperf.log", READINGS.file, STAGES_FILE)
_CELLS = "cells"
_OF_PROCESSES = "written by a running process, and not read afterwards"
_RENDERED = "rendered from the other files, and again by trtx report"
NOT_COVERED: Mapping[str, str] = {
    "journal.jsonl": "it contains the digests",
    **dict.fromkeys(
        (
            "report.html",
            "summary.json",
            "summary.csv",
            "summary.md",
            "summary.parquet",
            "records.parquet",
            "junit.xml",
        ),
        _RENDERED,
    ),
    "attempts/*": "moved aside when a run is resumed, and not read afterwards",
    "cells/*/trial-*": "files of aiperf from which no metric is computed, and which are not read afterwards",
    "load/*": _OF_PROCESSES,
    "*.log": _OF_PROCESSES,
    "*/serve/*": _OF_PROCESSES,
    **dict.fromkeys((".*", "*/.*"), "an incomplete file of a run that was killed while it wrote"),
}
"""Patterns of paths within a run directory (``*`` also matches ``/``) -> why the end of a run records no digest.

``cell.json`` and the files from which a trial's metrics are computed are covered by their own events.
"""


@dataclass(frozen=True, slots=True)
class FileDigest:
    bytes: int
    sha256: str


def digest_of_text(text: str) -> FileDigest:
    """The digest of a file that will hold ``text`` in UTF-8."""
    content = text.encode()
    return FileDigest(len(content), hashlib.sha256(content).hexdigest())


def digests_of(directory: Path, names: Iterable[str] = FOLLOWED) -> dict[str, FileDigest]:
    """Digests by file name within ``directory``. Missing and unreadable files are left out."""
    return {name: found for name in names if (found := _digest(directory / name)) is not None}


def documents_of(run_dir: Path) -> tuple[str, ...]:
    """Paths, within a run directory, of all files whose digest the end of the run records."""
    names = (path.relative_to(run_dir).as_posix() for path in sorted(run_dir.rglob("*")) if path.is_file())
    return tuple(name for name in names if why_not_recorded(name) is None)


def why_not_recorded(name: str) -> str | None:
    """The reason why a run records no digest of the file ``name`` when it ends; None if it records a digest."""
    if name.startswith(f"{_CELLS}/") and name.count("/") == 2:
        return None if not name.endswith("/cell.json") else "it is recorded when the cell is written"
    return next((why for pattern, why in NOT_COVERED.items() if fnmatchcase(name, pattern)), None)


@dataclass(frozen=True, slots=True)
class Changes:
    """Differences between files and their recorded digests."""

    changed: tuple[str, ...] = ()  # one sentence per file, without a full stop
    gone: tuple[str, ...] = ()  # names of files that are missing or unreadable


def changes_since(trial: Path, then: Mapping[str, FileDigest]) -> Changes:
    """Returns which files of a trial have changed or gone since ``then``, their digests when the trial ended."""
    return changes_in(trial, then, "the trial ended", prefix=f"{trial.name}/")


def changes_in(directory: Path, then: Mapping[str, FileDigest], moment: str, *, prefix: str = "") -> Changes:
    """Returns which of the files in ``then`` have changed or gone; ``then`` maps names in ``directory`` to digests.

    ``moment`` says in messages when the digests were made. ``prefix`` is put before each name in messages.
    """
    changed, gone = [], []
    for name, before in then.items():
        now, shown = _digest(directory / name), f"{prefix}{name}"
        if now is None:
            gone.append(shown)
        elif now.bytes != before.bytes:
            changed.append(f"{shown} has {now.bytes:,} bytes, but had {before.bytes:,} when {moment}")
        elif now != before:
            changed.append(f"{shown} has different content from when {moment}")
    return Changes(tuple(changed), tuple(gone))


def _digest(path: Path) -> FileDigest | None:
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return FileDigest(file.tell(), sha256)
    except OSError:
        return None
