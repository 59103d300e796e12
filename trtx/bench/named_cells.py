"""The cells of a run by name, for verbs that take ``--cell``."""

from __future__ import annotations

from pathlib import Path

from trtx.bench.cells import Cell, read_cells
from trtx.errors import UsageError


def cells_named(run_dir: Path, name: str | None) -> tuple[Cell, ...]:
    """The finished cell of this name, or all. Raises UsageError if there is none."""
    cells = read_cells(run_dir)
    if not cells:
        raise UsageError(f"{str(run_dir)!r} has no finished cell; expected a run directory of trtx bench")
    found = tuple(cell for cell in cells if name in (None, cell.name))
    if not found:
        names = ", ".join(cell.name for cell in cells[:8])
        raise UsageError(f"--cell {name!r} is not in this run; expected one of {names}")
    return found
