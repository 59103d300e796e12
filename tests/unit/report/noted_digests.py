"""Gives a run from before digests were noted those of the files that lie there."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from trtx.bench.cells import trial_directory
from trtx.bench.digests import digests_of
from trtx.bench.journal import JOURNAL, TrialEnded


def note_digests(run: Path) -> None:
    path = run / JOURNAL.file
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for event in events:
        if event["event"] == TrialEnded.name():
            trial = trial_directory(run / "cells" / event["cell"], event["trial"])
            event["files"] = {name: asdict(one) for name, one in digests_of(trial).items()}
    path.write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
