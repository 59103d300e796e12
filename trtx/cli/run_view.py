"""The progress of a run on stderr: bars on a terminal, lines elsewhere. Results go to stdout."""

from __future__ import annotations

from pathlib import Path

from rich.progress import TaskID

from trtx.bench import SweepProgress
from trtx.cli.bars import BarsView
from trtx.cli.score_bars import ScoreBars, tasks_line
from trtx.evals.messages import EvalProgress as ScoringProgress
from trtx.experiment import RunListener
from trtx.launch import Event

_MOST_FILES = 4  # in one sentence
# The topology events to show; the others follow from these, or are in the log.
_SHOWN = {
    "ready",
    "exited",
    "vanished",
    "lost",
    "found",
    "recomputed",
    "unproved",
    "restarting",
    "recovered",
    "gave-up",
    "stopped",
}


class RunProgress(BarsView, RunListener):
    """Shows the progress of one run. A context manager."""

    def __init__(self) -> None:
        super().__init__()
        self.run_dir: Path | None = None  # None until the run directory exists
        self._trials = 0  # number of trials, set when the run starts
        self._trials_ended = 0
        self._cells_bar: TaskID | None = None
        self._cell_bar: TaskID | None = None
        self._cell_shown: tuple[str, int, str] = ("", 0, "")
        self._scores = ScoreBars(self._bars, self.say)
        self._passes: dict[str, TaskID] = {}
        self._passes_ended: set[str] = set()

    def on_note(self, line: str) -> None:
        self.say(line)

    def on_start(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.say(f"run: {run_dir}")

    def on_loading(self, log: Path) -> None:
        self.say(f"loading tasks and datasets; log: {log}")

    def on_loaded(self, samples: dict[str, int], topologies: tuple[str, ...]) -> None:
        self.say(tasks_line(samples, topologies))

    def on_cells(self, kept: tuple[str, ...], ahead: tuple[str, ...], trials: int) -> None:
        if kept:
            told = (f"{name} (some of its trials)" if name in ahead else name for name in kept)
            self.say(f"kept: {', '.join(told)}")
            self.say(f"to measure: {', '.join(ahead) or 'nothing'}")
        self._trials = trials
        self._cells_bar = self._bars.add_task("cells", total=trials)

    def on_changed(self, files: tuple[str, ...]) -> None:
        more = f"; and {len(files) - _MOST_FILES} more (see journal.jsonl)" if len(files) > _MOST_FILES else ""
        self.say(
            f"some trials are measured again because their files have changed: {'; '.join(files[:_MOST_FILES])}{more}"
        )

    def on_reference(self) -> None:
        self.say("reference: the embedded engine loads the checkpoint")

    def on_topology(self, label: str, *, is_served: bool) -> None:
        self.say(f"{label}: starting the topology" if is_served else f"{label}: measuring the attached server")

    def on_event(self, label: str, event: Event) -> None:
        if event.kind in _SHOWN:
            self.say(f"{label}: {event.message}")

    def on_measured(self, now: SweepProgress) -> None:
        name = now.cell if now.trials == 1 else f"{now.cell} trial {now.trial}/{now.trials}"
        is_new = (now.cell, now.trial, now.phase) != self._cell_shown
        self._cell_shown = (now.cell, now.trial, now.phase)
        if now.phase == "ended":
            self._trials_ended += 1
            if self._cells_bar is not None:
                self._bars.update(self._cells_bar, completed=self._trials_ended)
            self.say(f"{name}: measured ({self._trials_ended} of {self._trials})")
        elif is_new and self._bars.disable and now.phase == "running":
            self.say(f"{name}: {now.requests_total} requests, including the warm-up")
        if self._cell_bar is None:
            self._cell_bar = self._bars.add_task(name)
        label = f"{name}: aiperf starts" if now.phase == "starting" else name
        self._bars.update(self._cell_bar, description=label, completed=now.requests, total=now.requests_total)

    def on_scored(self, now: ScoringProgress) -> None:
        self._scores.on_progress(now)

    def on_asked(self, label: str, ended: int, total: int) -> None:
        if label not in self._passes:
            self._passes[label] = self._bars.add_task(label, total=total)
        self._bars.update(self._passes[label], completed=ended)
        if ended == total and label not in self._passes_ended:
            self._passes_ended.add(label)
            self.say(f"{label}: {total} requests")

    def on_kill(self, route: str, name: str, open_streams: int) -> None:
        self.say(f"{route}: killed {name} with {open_streams} open streams")
