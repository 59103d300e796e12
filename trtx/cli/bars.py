"""Progress bars on a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from trtx.cli.console import ProgressConsole, ResultConsole
from trtx.cli.sentences import wrapped


class Bars(Progress):
    """Progress bars that disappear when they end. If ``console`` can't redraw, only printed lines appear."""

    def __init__(self, console: ProgressConsole) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        super().__init__(*columns, console=console, disable=not console.can_redraw, transient=True)

    def stop(self) -> None:
        if not self.disable:  # on a disabled progress, Rich 14.1's stop() prints an empty line
            super().stop()


class BarsView:
    """A context manager that shows progress bars on stderr."""

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
        """Prints the result to stdout, or to stderr if stdout is reserved for JSON."""
        console = self._console if to_stderr else ResultConsole()
        console.print()
        console.print(table)
        console.print()

    def say(self, line: str) -> None:
        """Prints a line above the bars."""
        self._bars.console.print(wrapped(line), soft_wrap=True)
