"""The rooms' arrows point down only, and the slow packages stay where they belong (docs/architecture.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trtx

ROOT = Path(trtx.__file__).parent
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "text": {"errors"},
    "config": {"errors"},
    "checkpoint": {"errors"},
    "memory": {"config", "checkpoint", "errors"},
    "topology": {"memory", "config", "checkpoint", "errors", "engine"},
    "launch": {"topology", "memory", "config", "checkpoint", "engine", "errors"},
    "frontend": {"errors"},
    "torch_engine": {"text", "memory", "config", "checkpoint", "errors"},
    "engine": {"torch_engine", "text", "checkpoint", "errors"},
    "worker": {"engine", "text", "config", "checkpoint", "errors"},
    "build": {"engine", "torch_engine", "text", "memory", "config", "checkpoint", "errors"},
    "bench": {"errors"},
    "report": {"bench", "errors"},
    "doctor": {"launch", "topology", "engine", "config", "checkpoint", "errors"},
    "experiment": {"launch", "topology", "config", "checkpoint", "bench", "report", "errors"},
    "cli": {
        "experiment",
        "launch",
        "topology",
        "config",
        "checkpoint",
        "bench",
        "report",
        "engine",
        "errors",
        "doctor",
        "build",
        "memory",
    },
}

# Inside the torch engine: two processes, and what they share. Whoever wants more of the other side adds a message.
SHARED = {"messages", "channel", "sampling_plan", "llm_args"}
TOWERS: dict[str, set[str]] = {
    "__init__": set(),
    **dict.fromkeys(SHARED, SHARED),
    "llmapi": SHARED,
    "batch": SHARED,
    "handoff": {"batch"},
    "runner": {"batch", *SHARED},
    "core": {"runner", "handoff", "batch", *SHARED},
}


def _room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imports(path: Path, within: str = "trtx") -> set[str]:
    """Names of what ``path`` imports directly below the package ``within``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module] if node.module != within else [f"{within}.{alias.name}" for alias in node.names]
        found |= {name.removeprefix(f"{within}.").split(".")[0] for name in names if name.startswith(f"{within}.")}
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_rooms_below_it(path: Path) -> None:
    room = _room(path)
    if room in ("__init__", "__main__"):
        return
    above = _imports(path) - ALLOWED[room] - {room, "__version__"}
    assert not above, f"{path.relative_to(ROOT)} reaches up to {sorted(above)}"


TORCH_ENGINE = ROOT / "torch_engine"


@pytest.mark.parametrize(
    "path", sorted(TORCH_ENGINE.rglob("*.py")), ids=lambda path: str(path.relative_to(TORCH_ENGINE))
)
def test_the_two_processes_of_the_torch_engine_share_messages_alone(path: Path) -> None:
    tower = path.relative_to(TORCH_ENGINE).parts[0].removesuffix(".py")
    assert tower in TOWERS, f"{tower} is in neither process; put it into llmapi, core, runner or handoff"
    across = _imports(path, "trtx.torch_engine") - TOWERS[tower] - {tower}
    assert not across, (
        f"torch_engine/{path.relative_to(TORCH_ENGINE)} imports {sorted(across)}, which {tower} may not: llmapi "
        "runs in the caller's process, core, runner and handoff in the engine's. Let a field of "
        "torch_engine/messages.py carry what it needs; a type that both name belongs there"
    )


def test_nobody_outside_the_torch_engine_enters_its_process() -> None:
    outside = [path for path in ROOT.rglob("*.py") if TORCH_ENGINE not in path.parents]
    found = {str(path.relative_to(ROOT)): _imports(path, "trtx.torch_engine") & {"core", "handoff"} for path in outside}
    entered = {path: names for path, names in found.items() if names}
    assert not entered, f"{entered} is the engine's own process; ask trtx.torch_engine.llmapi, which asks that process"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["serve", "--help"], ["bench", "--help"], ["build", "--help"], ["--version"]]
)
def test_help_imports_no_slow_package(arguments: list[str]) -> None:
    program = (
        "import sys; from trtx.cli.app import run; code = run(sys.argv[1:]); "
        "slow = {'torch', 'dynamo', 'pandas', 'tensorrt_llm', 'plotly', 'transformers', 'nixl'} & set(sys.modules); "
        "sys.exit(f'imported {sorted(slow)}' if slow else code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
