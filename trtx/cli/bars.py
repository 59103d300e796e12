"""Bars of what a verb does, on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bars(Progress):
    """Gone when they end. Where ``console`` is no terminal there are none, and only what is printed is seen."""

    def __init__(self, console: Console) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        super().__init__(*columns, console=console, disable=not console.is_terminal, transient=True)

    def stop(self) -> None:
        if not self.disable:  # Rich 14.1 prints an empty line
            super().stop()
