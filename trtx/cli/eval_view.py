"""What ``trtx eval`` shows while it runs: a bar a task on a terminal, lines elsewhere. On stderr."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import TaskID

from trtx.cli.bars import BarsView

if TYPE_CHECKING:
    from trtx.evals.messages import Progress
    from trtx.experiment import EvaluationListener
    from trtx.launch import Event

# The others say what follows from these, or what the log has.
_SHOWN = {"ready", "exited", "vanished", "lost", "unproved", "restarting", "recovered", "gave-up", "stopped"}


class EvalView(BarsView):
    """Follows one run. A context manager."""

    def __init__(self) -> None:
        super().__init__()
        self.run_dir: Path | None = None  # None until there is one
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._said: set[tuple[str, str, str]] = set()

    @property
    def listener(self) -> EvaluationListener:
        from trtx.experiment import EvaluationListener

        return EvaluationListener(
            self._on_loading, self._on_start, self._on_loaded, self._on_topology, self._on_event, self._on_progress
        )

    def print_table(self, table: RenderableType, *, to_stderr: bool) -> None:
        console = self._console if to_stderr else Console(highlight=False)
        console.print()
        console.print(table)
        console.print()

    def _say(self, line: str) -> None:
        self._bars.console.print(line, soft_wrap=True)

    def _on_loading(self, log: Path) -> None:
        self._say(f"reading tasks and datasets; log: {log}")

    def _on_start(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._say(f"run: {run_dir}")

    def _on_loaded(self, samples: dict[str, int], topologies: tuple[str, ...]) -> None:
        names = ", ".join(f"{name} ({count})" for name, count in list(samples.items())[:8])
        more = f" and {len(samples) - 8} more" if len(samples) > 8 else ""
        self._say(f"tasks: {names}{more}; on {', '.join(topologies) or 'nothing, all is answered'}")

    def _on_topology(self, label: str) -> None:
        self._say(f"{label}: asking" if label == "attached" else f"{label}: starting the topology")

    def _on_event(self, label: str, event: Event) -> None:
        if event.kind in _SHOWN:
            self._say(f"{label}: {event.message}")

    def _on_progress(self, now: Progress) -> None:
        name = f"{now.topology} {now.task}"
        if (now.topology, now.task) not in self._tasks:
            self._tasks[now.topology, now.task] = self._bars.add_task(name)
        self._bars.update(
            self._tasks[now.topology, now.task],
            description=f"{name}{_running(now)}",
            completed=now.done,
            total=now.total,
        )
        if now.kept and now.done == now.kept:
            self._once(now, "kept", f"{name}: {now.kept} of {now.total} samples kept of an earlier attempt")
        if now.done == now.total:
            answered = "" if now.answered == now.done else f"{now.answered} of "
            self._once(now, "ended", f"{name}: {answered}{now.done} samples{_running(now)}")

    def _once(self, now: Progress, what: str, line: str) -> None:
        if (now.topology, now.task, what) not in self._said:
            self._said.add((now.topology, now.task, what))
            self._say(line)


def _running(now: Progress) -> str:
    if now.metric is None or now.score is None or now.low is None or now.high is None:
        return ""
    return f", {now.metric} {now.score:.3f} ({now.low:.3f}–{now.high:.3f})"
