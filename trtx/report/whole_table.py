"""A Rich table that never truncates numbers."""

from __future__ import annotations

from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table

_WIDEST = 1000  # columns; more than any part of a table needs
_FOLDED = 8  # minimum width of a column of names, which wrap


class WholeTable(Table):
    """A table without borders. On a narrow terminal it extends beyond the right edge.

    Rich would truncate numbers instead, and ``2…`` might be 20 or 29.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(
            pad_edge=False, box=None, padding=(0, 1, 0, 0), header_style="bold", caption_justify="left", **options
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = sum(1 + self._least(column, console, options) for column in self.columns)
        yield from super().__rich_console__(console, options.update(max_width=max(options.max_width, needed - 1)))

    def _least(self, column: Column, console: Console, options: ConsoleOptions) -> int:
        parts = (column.header, *column.cells)
        width = max(Measurement.get(console, options.update(max_width=_WIDEST), part).maximum for part in parts)
        return width if column.no_wrap else min(width, _FOLDED)
