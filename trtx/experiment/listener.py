"""What a run reports while it is in progress."""

from __future__ import annotations

from pathlib import Path

from trtx.bench import SweepProgress
from trtx.evals.messages import EvalProgress as ScoringProgress
from trtx.launch import Event


class RunListener:
    """Receives the progress of a run; each method does nothing unless it is overridden.

    The methods are called from the run's thread, ``on_event`` also from the supervisor's.
    """

    def on_note(self, line: str) -> None:
        """A sentence about the request, before anything starts."""

    def on_start(self, run_dir: Path) -> None:
        """The run directory, once everything was checked."""

    def on_loading(self, log: Path) -> None:
        """Tasks and datasets are being loaded, which takes minutes if they are downloaded."""

    def on_loaded(self, samples: dict[str, int], topologies: tuple[str, ...]) -> None:
        """The number of samples by task, and the topologies to score."""

    def on_cells(self, kept: tuple[str, ...], ahead: tuple[str, ...], trials: int) -> None:
        """Names of cells and scores that are kept, names of those to measure, and the number of trials."""

    def on_changed(self, files: tuple[str, ...]) -> None:
        """Changed files, for which trials are measured again."""

    def on_reference(self) -> None:
        """The reference of a fidelity run is about to be computed."""

    def on_topology(self, label: str, *, is_served: bool) -> None:
        """The measurement of a topology or of an attached server begins."""

    def on_event(self, label: str, event: Event) -> None:
        """Something happened in a served topology."""

    def on_measured(self, now: SweepProgress) -> None:
        """The state of a trial."""

    def on_scored(self, now: ScoringProgress) -> None:
        """The state of a task, after each of its samples."""

    def on_asked(self, label: str, ended: int, total: int) -> None:
        """The number of requests that have ended in a pass of a parity run."""

    def on_kill(self, route: str, name: str, open_streams: int) -> None:
        """A parity run has killed a worker with this many open streams."""
