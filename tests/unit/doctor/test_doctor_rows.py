"""Every row of the doctor is shown on some described machine, fits a terminal, and stands in docs/doctor.md."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import FrameType

import pytest
from doctor_machines import MACHINES, rows

from trtx.doctor import check, judge
from trtx.doctor.judge import system

DOCUMENT = Path(__file__).parents[3] / "docs" / "doctor.md"
MAKERS = {"ok", "absent", "warning", "failed"}


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
    assert not lacking, f"docs/doctor.md lacks these rows: {sorted(lacking)}; add each to its table, in backticks"
    stale = documented - SHOWN.keys()
    assert not stale, (
        f"docs/doctor.md has rows that no machine of tests/unit/doctor/doctor_machines.py shows: {sorted(stale)}; "
        "describe a machine that has them, or remove them"
    )


STATUSES: dict[str, set[str]] = {}
for _facts in MACHINES.values():
    for _name, _row in rows(_facts).items():
        STATUSES.setdefault(general(_name), set()).add(_row.status)


@pytest.mark.parametrize(
    "line",
    [
        line
        for line in DOCUMENT.read_text(encoding="utf-8").splitlines()
        if re.match(r"\| `[^|]+\|[^|]*\|[^|]*\|$", line)
    ],
)
def test_the_document_says_when_a_row_fails_and_warns(line: str) -> None:
    _, names, fails, warns, _ = line.split("|")
    given = set().union(*(STATUSES.get(name, set()) for name in re.findall(r"`([^`]+)`", names)))
    for status, text, column in (("failed", fails, "Fails"), ("warning", warns, "Warns")):
        assert bool(text.strip()) == (status in given), (
            f"docs/doctor.md says under {column} of {names.strip()}: {text.strip() or 'nothing'}; the judges give it "
            f"the statuses {', '.join(sorted(given))}: correct the table"
        )


_GIB = 2**30
NUMBERS = {  # a row of the document -> what it says of the limits of its judge
    "CPU cores": (
        f"under {system.LEAST_CORES} cores", *(f"under {size // _GIB} GiB free" for size in system.LEAST_MEMORY),
    ),
    "open files": (
        f"fewer than {system.STREAMS[0]:,} streams", f"fewer than {system.STREAMS[1]:,}:",
        f"{system.FILES_A_STREAM} a stream",
    ),
    "inotify": (f"the {system.FRONTEND_INOTIFY} instances", f"fewer than {2 * system.FRONTEND_INOTIFY} "),
    "/dev/shm": (f"| under {system.LEAST_SHM // _GIB} GiB, for several", f"| under {system.LEAST_SHM // _GIB} GiB;"),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_the_document_has_the_limits_of_the_judges(name: str) -> None:
    row = next(line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{name}`"))
    lacking = [text for text in NUMBERS[name] if text not in row]
    assert not lacking, (
        f"the row `{name}` of docs/doctor.md lacks {lacking}, the limits in trtx/doctor/judge/system.py: correct one "
        "of them"
    )


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
