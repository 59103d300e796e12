"""Gives a run from before digests were noted those of the files that lie there, and of their cells and documents."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from trtx.bench.cells import CELL, trial_directory
from trtx.bench.digests import digest_of_text, digests_of
from trtx.bench.intact import run_ended
from trtx.bench.journal import JOURNAL, CellWritten, Journal, TrialEnded


def note_digests(run: Path) -> None:
    path = run / JOURNAL.file
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for event in events:
        if event["event"] == TrialEnded.name():
            trial = trial_directory(run / "cells" / event["cell"], event["trial"])
            event["files"] = {name: asdict(one) for name, one in digests_of(trial).items()}
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    note_end(run)


def note_end(run: Path) -> None:
    """Of its cells as they lie there, and of all other files."""
    for cell in sorted((run / "cells").glob(f"*/{CELL.file}")):
        text = cell.read_text(encoding="utf-8")
        Journal(run).note(CellWritten(cell=cell.parent.name, file=digest_of_text(text)))
    Journal(run).note(run_ended(run))
