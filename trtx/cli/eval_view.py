"""The progress view of ``trtx eval`` on stderr: one bar per task on a terminal, lines elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trtx.cli.bars import BarsView
from trtx.cli.score_bars import ScoreBars, tasks_line

if TYPE_CHECKING:
    from trtx.experiment import EvaluationListener
    from trtx.launch import Event

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


class EvalView(BarsView):
    """Shows the progress of one run. A context manager."""

    def __init__(self) -> None:
        super().__init__()
        self.run_dir: Path | None = None  # None until the run directory exists
        self._scores = ScoreBars(self._bars, self.say)

    @property
    def listener(self) -> EvaluationListener:
        from trtx.experiment import EvaluationListener

        return EvaluationListener(
            self._on_loading,
            self._on_start,
            self._on_loaded,
            self._on_topology,
            self._on_event,
            self._scores.on_progress,
            self.say,
        )

    def _on_loading(self, log: Path) -> None:
        self.say(f"reading tasks and datasets; log: {log}")

    def _on_start(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.say(f"run: {run_dir}")

    def _on_loaded(self, samples: dict[str, int], topologies: tuple[str, ...]) -> None:
        self.say(tasks_line(samples, topologies))

    def _on_topology(self, label: str) -> None:
        self.say(f"{label}: asking" if label == "attached" else f"{label}: starting the topology")

    def _on_event(self, label: str, event: Event) -> None:
        if event.kind in _SHOWN:
            self.say(f"{label}: {event.message}")
