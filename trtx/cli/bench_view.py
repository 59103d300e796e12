"""The progress view of ``trtx bench`` on stderr: bars on a terminal, lines elsewhere. Results go to stdout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import TaskID

from trtx.cli.bars import BarsView
from trtx.cli.score_bars import ScoreBars, tasks_line

if TYPE_CHECKING:
    from trtx.bench import Progress as Measured
    from trtx.experiment import Listener
    from trtx.launch import Event

_TOLD = 4  # the maximum number of files in one sentence
# The events to show; the others follow from these, or are in the log.
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


class BenchView(BarsView):
    """Shows the progress of one run. A context manager."""

    def __init__(self) -> None:
        super().__init__()
        self.run_dir: Path | None = None  # None until the run directory exists
        self._trials_total = 0  # set when the run starts
        self._trials_ended = 0
        self._run_bar: TaskID = self._bars.add_task("cells", total=None)
        self._cell_bar: TaskID | None = None
        self._said: tuple[str, int, str] = ("", 0, "")
        self._scores = ScoreBars(self._bars, self.say)

    @property
    def listener(self) -> Listener:
        from trtx.experiment import Listener

        return Listener(
            self._on_start,
            self._on_cells,
            self._on_topology,
            self._on_event,
            self._on_progress,
            self._on_loading,
            self._on_loaded,
            self._scores.on_progress,
            self._on_changed,
            self.say,
        )

    def _on_start(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.say(f"run: {run_dir}")

    def _on_loading(self, log: Path) -> None:
        self.say(f"reading tasks and datasets; log: {log}")

    def _on_loaded(self, samples: dict[str, int], topologies: tuple[str, ...]) -> None:
        self.say(tasks_line(samples, topologies))

    def _on_cells(self, kept: tuple[str, ...], ahead: tuple[str, ...], trials: int) -> None:
        if kept:
            told = (f"{name} (some of its trials)" if name in ahead else name for name in kept)
            self.say(f"kept: {', '.join(told)}")
            self.say(f"to measure: {', '.join(ahead) or 'nothing'}")
        self._trials_total = trials
        self._bars.update(self._run_bar, total=self._trials_total)

    def _on_changed(self, files: tuple[str, ...]) -> None:
        more = f"; and {len(files) - _TOLD} more, which journal.jsonl names" if len(files) > _TOLD else ""
        self.say(f"measured again, as files are not what their trials left: {'; '.join(files[:_TOLD])}{more}")

    def _on_topology(self, label: str) -> None:
        self.say(f"{label}: measuring" if label == "attached" else f"{label}: starting the topology")

    def _on_event(self, label: str, event: Event) -> None:
        if event.kind in _SHOWN:
            self.say(f"{label}: {event.message}")

    def _on_progress(self, now: Measured) -> None:
        name = now.cell if now.trials == 1 else f"{now.cell} trial {now.trial}/{now.trials}"
        is_new = (now.cell, now.trial, now.phase) != self._said
        self._said = (now.cell, now.trial, now.phase)
        if now.phase == "ended":
            self._trials_ended += 1
            self._bars.update(self._run_bar, completed=self._trials_ended)
            self.say(f"{name}: measured ({self._trials_ended} of {self._trials_total})")
        elif is_new and self._bars.disable and now.phase == "running":
            self.say(f"{name}: {now.requests_total} requests, warm-up included")
        if self._cell_bar is None:
            self._cell_bar = self._bars.add_task(name)
        label = f"{name}: aiperf starts" if now.phase == "starting" else name
        self._bars.update(self._cell_bar, description=label, completed=now.requests, total=now.requests_total)
