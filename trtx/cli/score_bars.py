"""Progress of an evaluation's samples: one bar per task on a terminal, and a line when a task starts again or ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.progress import Progress as Bars
from rich.progress import TaskID

if TYPE_CHECKING:
    from trtx.evals.messages import EvalProgress


class ScoreBars:
    """The bars of one run. ``say``: prints a line above the bars."""

    def __init__(self, bars: Bars, say: Callable[[str], None]) -> None:
        self._bars = bars
        self._say = say
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._said: set[tuple[str, str, str]] = set()

    def on_progress(self, now: EvalProgress) -> None:
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

    def _once(self, now: EvalProgress, what: str, line: str) -> None:
        if (now.topology, now.task, what) not in self._said:
            self._said.add((now.topology, now.task, what))
            self._say(line)


def tasks_line(samples: dict[str, int], topologies: tuple[str, ...]) -> str:
    """Formats the tasks with their numbers of samples, and the topologies that answer them."""
    names = ", ".join(f"{name} ({count})" for name, count in list(samples.items())[:8])
    more = f" and {len(samples) - 8} more" if len(samples) > 8 else ""
    return f"tasks: {names}{more}; on {', '.join(topologies) or 'nothing, all is answered'}"


def _running(now: EvalProgress) -> str:
    if now.metric is None or now.score is None or now.low is None or now.high is None:
        return ""
    return f", {now.metric} {now.score:.3f} ({now.low:.3f}–{now.high:.3f})"
