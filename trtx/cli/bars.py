"""Bars of what a verb does, on a terminal, and who shows them."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trtx.cli.console import ProgressConsole, ResultConsole
from trtx.cli.sentences import wrapped


class Bars(Progress):
    """Gone when they end. Where ``console`` can't redraw there are none, and only what is printed is seen."""

    def __init__(self, console: ProgressConsole) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        super().__init__(*columns, console=console, disable=not console.can_redraw, transient=True)

    def stop(self) -> None:
        if not self.disable:  # Rich 14.1 prints an empty line
            super().stop()


class BarsView:
    """Shows bars on stderr while inside: a context manager."""

    def __init__(self) -> None:
        self._console = ProgressConsole(stderr=True)
        self._bars = Bars(self._console)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._bars.stop()

    def print_table(self, table: RenderableType, *, to_stderr: bool) -> None:
        """The result, on standard output unless that is for JSON."""
        console = self._console if to_stderr else ResultConsole()
        console.print()
        console.print(table)
        console.print()

    def say(self, line: str) -> None:
        """Above the bars."""
        self._bars.console.print(wrapped(line), soft_wrap=True)
