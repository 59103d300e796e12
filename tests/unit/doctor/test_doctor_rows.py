"""Every row of the doctor is shown on some described machine, fits a terminal, and stands in docs/doctor.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from doctor_machines import MACHINES, rows

from trtx.doctor import judge

DOCUMENT = Path(__file__).parents[3] / "docs" / "doctor.md"
MAKERS = {"ok", "absent", "warning", "failed", "row"}


def general(name: str) -> str:
    """``GPU n memory`` for ``GPU 3 memory``."""
    return re.sub(r"\b\d+\b", "n", name)


SHOWN = {general(name): machine for machine, facts in MACHINES.items() for name in rows(facts)}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_described_machine_has_rows_of_different_names_that_fit_80_columns(machine: str) -> None:
    assert rows(MACHINES[machine])


def test_the_document_has_every_row_and_no_other() -> None:
    documented = {
        name
        for line in DOCUMENT.read_text(encoding="utf-8").partition("| Row |")[2].splitlines()
        for name in re.findall(r"`([^`]+)`", line.split("|")[1] if line.startswith("|") else "")
    }
    lacking = SHOWN.keys() - documented
    assert not lacking, f"give each a place in the table of {DOCUMENT.name}, in backticks: {sorted(lacking)}"
    stale = documented - SHOWN.keys()
    assert not stale, (
        f"no machine of doctor_machines.py shows {sorted(stale)} of {DOCUMENT.name}: describe one, or strike it"
    )


def named() -> Iterator[tuple[str, str]]:
    """Where a row is made, and its name as it stands there: a star where something is filled in."""
    for path in sorted(Path(judge.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            functions = [node.func.body, node.func.orelse] if isinstance(node.func, ast.IfExp) else [node.func]
            if not all(isinstance(one, ast.Name) and one.id in MAKERS for one in functions):
                continue
            first = node.args[0]
            parts = first.values if isinstance(first, ast.JoinedStr) else [first]
            pattern = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)
            if pattern != "*":
                yield f"{path.name}:{node.lineno}", pattern


@pytest.mark.parametrize(("place", "pattern"), sorted(named()))
def test_a_row_that_is_judged_is_shown(place: str, pattern: str) -> None:
    assert any(fnmatchcase(name, pattern) for name in SHOWN), (
        f"no machine shows the row {pattern!r} of {place}: yield it from a judge that judge() calls "
        "(trtx/doctor/judge/__init__.py), and describe in doctor_machines.py a machine that shows it"
    )
