"""``kill -9`` of ``trtx bench`` at a chosen moment, ``--resume``, and what has to hold then, for the proofs of both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from processes import TRTX
from recomputed_run import assert_recomputed
from topology_clients import wait_until

from trtx.launch.processes import members

RESULT = ".aiperf_results_ready.json"  # aiperf's last file of a trial
# What belongs to one start, or to the moment of it. Two commits whose sources are the same measure alike.
OF_ONE_START = ("Command", "Started", "Resumed", "Commit", "Load average before", "Time to load")
SAME = (
    "topology", "load", "concurrency", "isl", "osl", "status", "request_count", "error_request_count", "trials",
    "trials_asked", "time_to_first_token_count", "problem",
)  # fmt: skip


def events(run: Path | None, name: str) -> list[dict[str, Any]]:
    """Of the journal, those of one kind; a last line may be cut short."""
    path = run / "journal.jsonl" if run else Path()
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    return [event for event in map(json.loads, lines) if event["event"] == name]


@dataclass(frozen=True)
class Stage:
    """A part of a run, which begins when something can be seen of it."""

    name: str
    begun: Callable[[Path | None], bool]  # of the run directory; None: there is none yet


def stages(trials: int, cells: int) -> tuple[Stage, ...]:
    def has(file: str) -> Callable[[Path | None], bool]:
        return lambda run: run is not None and (run / file).exists()

    def noted(event: str, count: int) -> Callable[[Path | None], bool]:
        return lambda run: len(events(run, event)) >= count

    return (
        Stage("before anything is written", lambda run: True),
        Stage("the plan is written", lambda run: run is not None),
        Stage("the topology starts", has("run.lock.yaml")),
        Stage("the first trial", noted("trial_started", 1)),
        Stage("the trials between", noted("trial_ended", 1)),
        Stage("the last trial", noted("trial_started", trials)),
        Stage("after the last cell", noted("cell_ended", cells)),
        Stage("the report is written", has("verdict.json")),
        Stage("all is written", has("report.html")),
    )


@dataclass
class Benches:
    """One command line of ``trtx bench``, run again and again, each time in a directory of its own."""

    arguments: Sequence[str]
    stages: tuple[Stage, ...]
    directory: Path
    scratch: Path
    marker: str = field(default_factory=lambda: f"KILLED_BENCH={uuid.uuid4().hex}")

    def environment(self) -> dict[str, str]:
        name, _, value = self.marker.partition("=")
        return os.environ | {name: value, "TMPDIR": str(self.scratch)}

    def start(self, parent: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*TRTX, "bench", *self.arguments, "-o", str(parent)], cwd=self.directory, env=self.environment(),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def resume(self, run: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*TRTX, "bench", "--resume", str(run), "--json"], cwd=self.directory, env=self.environment(),
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip

    def uninterrupted(self) -> tuple[Path, list[float]]:
        """A run to its end, and how many seconds each stage of it took."""
        parent = self.directory / "uninterrupted"
        bench, begun = self.start(parent), [time.monotonic()]
        for stage in self.stages[1:]:
            self._wait_for(stage, bench, parent)
            begun.append(time.monotonic())
        assert bench.wait(60) == 0
        begun.append(time.monotonic())
        self.assert_nothing_left()
        run = run_of(parent)
        assert run is not None
        return run, [later - earlier for earlier, later in pairwise(begun)]

    def kill(self, parent: Path, stage: Stage, after_s: float) -> Path | None:
        """Kills a run so long after the stage has begun. The run directory, if there is one."""
        bench = self.start(parent)
        try:
            self._wait_for(stage, bench, parent)
            time.sleep(after_s)  # the moment itself is what is drawn
        finally:
            bench.send_signal(signal.SIGKILL)
            bench.wait()
        self.assert_nothing_left()
        return run_of(parent)

    def assert_nothing_left(self) -> None:
        """Of processes and of temporary files; guardians have 7 s, and aiperf's host ends with its imports."""
        wait_until(lambda: not members(self.marker, ()), 30, "every process of a killed run is gone")
        wait_until(lambda: not list(self.scratch.iterdir()), 30, f"nothing is left in {self.scratch}")

    def _wait_for(self, stage: Stage, bench: subprocess.Popen[bytes], parent: Path) -> None:
        deadline = time.monotonic() + 120
        while not stage.begun(run_of(parent)) and bench.poll() is None:
            assert time.monotonic() < deadline, f"not within 120 s: {stage.name}"
            time.sleep(0.003)


@contextmanager
def benches(arguments: Sequence[str], stages: tuple[Stage, ...], directory: Path) -> Iterator[Benches]:
    # Short, as aiperf's sockets lie under it: bench takes /tmp itself in place of a long one.
    with tempfile.TemporaryDirectory(prefix="k-", dir="/tmp") as scratch:
        yield Benches(arguments, stages, directory, Path(scratch))


def run_of(parent: Path) -> Path | None:
    found = sorted(parent.iterdir()) if parent.is_dir() else []
    return found[-1] if found else None


def measured(run: Path) -> dict[tuple[str, str], bytes]:
    """By cell and trial: the records of those that have aiperf's result."""
    return {
        (path.parents[1].name, path.parent.name): (path.parent / "profile_export.jsonl").read_bytes()
        for path in (run / "cells").glob(f"*/trial-*/{RESULT}")
    }


def assert_resumed(bench: Benches, run: Path, reference: Path) -> tuple[int, int]:
    """Resumes a killed run, and holds it against an uninterrupted one; how many trials held, and how many were made."""
    held = measured(run)
    before = len(events(run, "trial_started"))
    done = bench.resume(run)
    assert done.returncode == 0, done.stderr
    bench.assert_nothing_left()
    ended, expected = measured(run), measured(reference)
    assert set(ended) == set(expected)
    assert {trial: ended[trial] for trial in held} == held, "a trial that had a result is another now"
    started = [(event["cell"], f"trial-{event['trial']:02d}") for event in events(run, "trial_started")[before:]]
    assert Counter(started) == Counter(set(expected) - set(held)), "each that had none is measured once"
    assert [event["event"] for event in events(run, "run_ended")][-1:] == ["run_ended"]
    for told, of_reference in zip(_told(run), _told(reference), strict=True):
        assert told == of_reference, f"{told} where an uninterrupted run has {of_reference}"
    assert {path.name for path in run.iterdir()} - {"attempts"} == {path.name for path in reference.iterdir()}
    assert_recomputed(run)
    return len(held), len(started)


def _told(run: Path) -> list[Any]:
    """What a run says beside its timings: by what it is compared, its rows, and what it was measured under."""
    summary = json.loads((run / "summary.json").read_text())
    rows = [{key: row[key] for key in SAME} for row in summary["rows"]]
    conditions = [(name, value) for name, value in summary["conditions"].items() if name not in OF_ONE_START]
    return [json.loads((run / "conditions.json").read_text()), *rows, *conditions]
