"""docs/hosts-faults.md has a row for each fault that is measured."""

from __future__ import annotations

from pathlib import Path

from host_faults import FAULTS

DOCUMENT = Path(__file__).parents[3] / "docs" / "hosts-faults.md"


def test_each_fault_has_its_row_and_each_row_its_fault() -> None:
    lines = [line.split(" | ") for line in DOCUMENT.read_text(encoding="utf-8").splitlines()]
    rows = {(cells[0].removeprefix("| "), cells[1]) for cells in lines if len(cells) == 8 and cells[1] != "fault"}
    assert rows == {(fault.shape, fault.name) for fault in FAULTS}
