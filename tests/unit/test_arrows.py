"""The rooms' arrows point down only, and the slow packages stay where they belong: docs/architecture.md says which.

The arrows are read from its table of rooms, so text and test can't part. A row may name a room inside a room
(`room/inner/`), which is then held to its own row; who imports `room` from outside may import what is inside it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from source_trees import FILES, ROOT, nodes_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "architecture.md"
_ROW = re.compile(r"^\| `([a-z_/]+?)(?:/|\.py)` \| ([a-z_/, –]+) \| .+ \|$", re.MULTILINE)
ARROWS = {
    room: {name.strip() for name in imports.split(",")} - {"–"}
    for room, imports in _ROW.findall(DOCUMENT.read_text(encoding="utf-8"))
}
BY_THEIR_NAMES = ("launch", "topology", "doctor")  # what another room imports of them is in their __init__


def _room(path: str) -> str | None:
    """The innermost room of ``launch/ports`` or ``errors``; None for ``trtx/__init__.py`` and ``__main__.py``."""
    return max((room for room in ARROWS if f"{path}/".startswith(f"{room}/")), key=len, default=None)


@functools.cache
def _imported(path: Path) -> set[str]:
    """``launch/ports`` for each module of trtx that is imported, the names taken from it left out."""
    found = set()
    for node in nodes_of(path):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.removeprefix("trtx.").replace(".", "/") for name in names if name.startswith("trtx.")}
    return {name for name in found if name != "__version__"}


def _rooms_imported(path: Path) -> set[str]:
    own = _room(_module(path))
    return {room for name in _imported(path) if (room := _room(name)) is not None and room != own}


def _leads_to(arrow: str, own: str, imported: set[str]) -> set[str]:
    """What of ``imported`` an arrow from ``own`` leads to: from outside a room also to the rooms inside it."""
    is_outside = not f"{own}/".startswith(f"{arrow}/")
    return {room for room in imported if room == arrow or (is_outside and room.startswith(f"{arrow}/"))}


def _module(path: Path) -> str:
    return str(path.relative_to(ROOT).with_suffix(""))


def test_every_room_has_a_row() -> None:
    nowhere = {_module(path) for path in FILES if _room(_module(path)) is None} - {"__init__", "__main__"}
    assert not nowhere, f"give each a row, with its arrows, in the table of rooms of {DOCUMENT.name}: {sorted(nowhere)}"


def test_a_room_imports_only_rooms_below_it() -> None:
    without_an_arrow = []
    for path in FILES:
        if (room := _room(_module(path))) is None:
            continue
        imported = _rooms_imported(path) - {"errors"}
        if above := imported.difference(*(_leads_to(arrow, room, imported) for arrow in ARROWS[room])):
            without_an_arrow.append(
                f"{_module(path)} imports {sorted(above)}, and the row {room} of {DOCUMENT.name} has no such arrow: "
                "move what it needs down, or draw the arrow there"
            )
    assert not without_an_arrow, "\n".join(without_an_arrow)


def test_no_arrow_is_drawn_that_nothing_takes_and_none_leads_back() -> None:
    taken: dict[str, set[str]] = {room: set() for room in ARROWS}
    for path in FILES:
        if (room := _room(_module(path))) is not None:
            taken[room] |= _rooms_imported(path)
    drawn_only = {
        room: left
        for room, arrows in ARROWS.items()
        if (left := [arrow for arrow in sorted(arrows) if not _leads_to(arrow, room, taken[room])])
    }
    assert not drawn_only, f"take these arrows out of the table of rooms of {DOCUMENT.name}: {drawn_only}"
    circle = dict(ARROWS)
    while lowest := [room for room, below in circle.items() if not below & circle.keys()]:
        for room in lowest:
            del circle[room]
    assert not circle, f"arrows of {DOCUMENT.name} lead round in a circle: {sorted(circle)}"


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for types count too: a circle that a lazy import hides is still one."""
    names = {_module(path).removesuffix("/__init__") for path in FILES}
    left = {}
    for path in FILES:
        own = _module(path).removesuffix("/__init__")
        candidates = {prefix for name in _imported(path) for prefix in (name, name.rpartition("/")[0])}
        exact = {name if name in names else name.rpartition("/")[0] for name in _imported(path)} & candidates
        left[own] = (exact & names) - {own}
    while lowest := [name for name, below in left.items() if not below & left.keys()]:
        for name in lowest:
            del left[name]
    while unused := [name for name in left if not any(name in below for below in left.values())]:
        for name in unused:
            del left[name]
    assert not left, f"a circle of imports; move what these files share into one below them: {sorted(left)}"


@pytest.mark.parametrize("room", BY_THEIR_NAMES)
def test_a_room_is_entered_by_its_names_alone(room: str) -> None:
    names = importlib.import_module(f"trtx.{room}").__all__
    for name in names:
        assert hasattr(importlib.import_module(f"trtx.{room}"), name), f"trtx/{room}/__init__.py lacks {name}"
    for path in FILES:
        if _room(_module(path)) in (room, None):
            continue
        inside = {name for name in _imported(path) if name.startswith(f"{room}/")} - {
            f"{room}/{name}" for name in names
        }
        assert not inside, (
            f"{_module(path)} goes round trtx.{room}: add to its __init__ what stands in {sorted(inside)}"
        )


def test_the_doctors_judges_look_at_facts_alone() -> None:
    """Or a described machine is not what they judge, and no test of a row means anything."""
    looking = {"psutil", "os", "subprocess", "pynvml", "socket", "shutil", "resource", "importlib"}
    for path in sorted((ROOT / "doctor" / "judge").glob("*.py")):
        names = set()
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").partition(".")[0])
        assert not names & looking, (
            f"{_module(path)} imports {', '.join(sorted(names & looking))} and looks at this machine: "
            "read it as a fact in trtx/doctor/gather"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["--help"], ["serve", "--help"], ["bench", "--help"], ["build", "--help"], ["--version"]]
)
def test_help_imports_no_slow_package(arguments: list[str]) -> None:
    program = (
        "import sys; from trtx.cli.app import run; code = run(sys.argv[1:]); "
        "slow = {'torch', 'dynamo', 'pandas', 'pyarrow', 'numpy', 'scipy', 'tensorrt_llm', 'plotly', 'transformers', "
        "'nixl'} & set(sys.modules); "
        "sys.exit(f'imported {sorted(slow)}' if slow else code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("trtx.launch.guardian", {"msgspec", "numpy", "pydantic", "trtx.topology"}),
        ("trtx.media.decoder.process", {"asyncio", "httpx", "pydantic", "torch", "transformers"}),
        ("trtx.worker.__main__, trtx.worker.engine", {"httpx", "numpy", "rich", "torch", "transformers"}),
        ("trtx.torch_engine.core.process", {"pydantic", "transformers"}),
    ],
)
def test_a_process_of_a_topology_imports_no_package_that_it_does_not_need(modules: str, absent: set[str]) -> None:
    """A topology starts these many times, and its start waits for their imports."""
    program = f"import sys, {modules}; print(*sorted({absent} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split(), f"{modules} imports {done.stdout.strip()}: import it in the function that needs it"
