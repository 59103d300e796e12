"""What is kept of a real run: aiperf's records, and everything that follows from them, file by file.

``make goldens`` writes anew what follows, cells included, and fails: whoever changed a figure looks at the difference,
and runs the tests again.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from trtx.bench import Cell, cell_directory
from trtx.bench.cells import CELL, measure_cell, write_cell
from trtx.experiment.directory import read_lock
from trtx.experiment.resumption import read_recorded
from trtx.report import render

GOLDEN = Path(__file__).parent / "golden"
RENDERED = ("summary.csv", "summary.md", "summary.json", "junit.xml")
CELLS = ("agg-c1", "agg-c2", "disagg-c1", "disagg-c2")


def _measured(run: Path) -> dict[str, Cell]:
    """The cells as their records give them."""
    spec = read_lock(run)
    recorded = read_recorded(run, spec)
    return {
        f"{mode}-{load.label}": measure_cell(
            cell_directory(run, mode, load.concurrency), recorded.target(mode), load, {}, range(1, spec.load.trials + 1)
        )
        for mode in spec.measured_modes
        for load in spec.load.loads
    }


@pytest.fixture(scope="session", autouse=True)
def _written_where_asked() -> None:
    if not os.environ.get("TRTX_WRITE_GOLDEN"):
        return
    for cell in _measured(GOLDEN / "run").values():
        write_cell(cell_directory(GOLDEN / "run", cell.mode, cell.concurrency), cell)


def _check(kept: Path, found: str) -> None:
    if os.environ.get("TRTX_WRITE_GOLDEN"):
        kept.write_text(found, encoding="utf-8")
        pytest.fail(f"{kept} was written; look at it (git diff), then run the tests without TRTX_WRITE_GOLDEN")
    assert found == kept.read_text(encoding="utf-8"), (
        f"{kept.name} is another than before; if it should be, make goldens writes it anew"
    )


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_of_a_real_run_is_what_its_records_give(name: str, tmp_path: Path) -> None:
    write_cell(tmp_path, _measured(GOLDEN / "run")[name])
    _check(GOLDEN / "run" / "cells" / name / CELL.file, (tmp_path / CELL.file).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RENDERED)
def test_the_summary_files_of_a_real_run_are_the_golden_ones(golden_run: Path, name: str) -> None:
    render(golden_run)
    _check(GOLDEN / name, (golden_run / name).read_text(encoding="utf-8"))


def test_goldens_that_were_written_fail_so_that_somebody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTX_WRITE_GOLDEN", "1")
    kept = Path(shutil.copy(GOLDEN / "summary.md", tmp_path))
    with pytest.raises(pytest.fail.Exception, match="was written; look at it"):
        _check(kept, kept.read_text(encoding="utf-8"))
    with pytest.raises(pytest.fail.Exception, match="was written; look at it"):
        _check(kept, "another")
    assert kept.read_text(encoding="utf-8") == "another"
