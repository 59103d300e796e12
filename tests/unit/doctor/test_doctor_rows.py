"""Every row of the doctor is shown on some described machine, and fits a terminal."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType

import pytest
from doctor_machines import MACHINES, rows

from trtx.doctor import check, judge

MAKERS = {"ok", "absent", "warning", "failed"}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_described_machine_has_rows_of_different_names_that_fit_80_columns(machine: str) -> None:
    assert rows(MACHINES[machine])


@dataclass(frozen=True)
class Site:
    """A call that makes a row: where it stands, the row's name with a star for what is filled in, and the statuses."""

    file: str
    lines: range
    pattern: str
    statuses: frozenset[str]


def _sites() -> Iterator[Site]:
    for path in sorted(Path(judge.__file__).parent.glob("*.py")):
        for scope in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(scope, ast.FunctionDef):
                continue
            chosen = {  # row = failed if … else warning
                target.id: node.value
                for node in ast.walk(scope)
                if isinstance(node, ast.Assign)
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            for node in ast.walk(scope):
                if isinstance(node, ast.Call) and node.args:
                    function = chosen.get(getattr(node.func, "id", ""), node.func)
                    ends = [function.body, function.orelse] if isinstance(function, ast.IfExp) else [function]
                    statuses = frozenset(getattr(end, "id", "") for end in ends)
                    if statuses <= MAKERS:
                        first = node.args[0]
                        parts = first.values if isinstance(first, ast.JoinedStr) else [first]
                        pattern = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)
                        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                        yield Site(path.name, lines, pattern, statuses)


SITES = list(_sites())


@pytest.fixture(scope="module")
def made() -> set[tuple[str, int, str]]:
    """File, line and status of each row that a described machine is given."""
    found = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == check.__file__ and frame.f_code.co_name in MAKERS:
            caller = frame.f_back
            assert caller is not None
            found.add((Path(caller.f_code.co_filename).name, caller.f_lineno, frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        for facts in MACHINES.values():
            judge.judge(facts)
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{site.file}:{site.lines[0]}")
def test_every_status_that_a_judge_can_give_is_shown(site: Site, made: set[tuple[str, int, str]]) -> None:
    shown = {status for file, line, status in made if file == site.file and line in site.lines}
    assert not (unseen := site.statuses - shown), (
        f"no machine has the row {site.pattern!r} of trtx/doctor/judge/{site.file}:{site.lines[0]} with the status "
        f"{', '.join(sorted(unseen))}: yield it from the judge function of its file, and add a machine that shows it "
        "to tests/unit/doctor/doctor_machines.py"
    )


def test_the_rows_of_every_judge_are_found() -> None:
    """Or a way to make one that is not seen above would go unshown."""
    assert {site.file for site in SITES} == {"gpus.py", "hosts.py", "software.py", "system.py", "topologies.py"}
    shown = {name for facts in MACHINES.values() for name in rows(facts)}
    unseen = {name for name in shown if not any(fnmatchcase(name, site.pattern) for site in SITES)}
    assert not unseen
