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
    "config": {"errors"},
    "checkpoint": {"errors"},
    "memory": {"config", "checkpoint", "errors"},
    "topology": {"memory", "config", "checkpoint", "errors", "engine"},
    "launch": {"topology", "memory", "config", "checkpoint", "engine", "errors"},
    "frontend": {"errors"},
    "torch_engine": {"memory", "config", "checkpoint", "errors"},
    "engine": {"torch_engine", "errors"},
    "worker": {"engine", "torch_engine", "config", "errors"},
    "build": {"engine", "torch_engine", "memory", "config", "checkpoint", "errors"},
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


def _room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module] if node.module != "trtx" else [f"trtx.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("trtx.")}
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_rooms_below_it(path: Path) -> None:
    room = _room(path)
    if room in ("__init__", "__main__"):
        return
    above = _imports(path) - ALLOWED[room] - {room, "__version__"}
    assert not above, f"{path.relative_to(ROOT)} reaches up to {sorted(above)}"


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
