"""Which files of a trial a cell follows from, and what they were as the trial ended: size and SHA-256 of each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtx.bench.readings import READINGS
from trtx.bench.records import RECORDS_FILE

# Figures follow from aiperf's records, checks also from its log and from what was read of the server.
FOLLOWED = (RECORDS_FILE, "logs/aiperf.log", READINGS.file)


@dataclass(frozen=True, slots=True)
class FileDigest:
    bytes: int
    sha256: str


def digests_of(trial: Path) -> dict[str, FileDigest]:
    """By name within the trial's directory; a file that is not there, or can't be read, is left out."""
    return {name: found for name in FOLLOWED if (found := _digest(trial / name)) is not None}


@dataclass(frozen=True, slots=True)
class Changes:
    """What became of a trial's files since it ended."""

    changed: tuple[str, ...] = ()  # a sentence each, without its full stop
    gone: tuple[str, ...] = ()  # names: they are not there, or can't be read


def changes_since(trial: Path, then: Mapping[str, FileDigest]) -> Changes:
    """Reads every file that was there as it ended."""
    changed, gone = [], []
    for name, before in then.items():
        now, shown = _digest(trial / name), f"{trial.name}/{name}"
        if now is None:
            gone.append(shown)
        elif now.bytes != before.bytes:
            changed.append(f"{shown} has {now.bytes:,} bytes, and had {before.bytes:,} as the trial ended")
        elif now != before:
            changed.append(f"{shown} holds something else than as the trial ended")
    return Changes(tuple(changed), tuple(gone))


def _digest(path: Path) -> FileDigest | None:
    try:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return FileDigest(file.tell(), sha256)
    except OSError:
        return None
