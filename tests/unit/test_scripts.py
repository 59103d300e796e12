"""Benchmarks, training scripts and GPU tests, which CI does not run, still find what they import."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import trtx

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path for folder in ("benchmarks", "tools/training", "tests/gpu") for path in (ROOT / folder).rglob("*.py")
)


@functools.cache
def _names(module: str) -> frozenset[str]:
    """Submodules of one of trtx's modules, and what its top level defines or imports, without importing it."""
    path = Path(trtx.__file__).parent.joinpath(*module.split(".")[1:])
    names = {entry.stem for entry in path.iterdir()} if path.is_dir() else set()
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not source.exists():
        return frozenset(names)
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_that_it_takes_from_trtx_is_there(script: Path) -> None:
    missing = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "trtx"
        for alias in node.names
        if alias.name not in _names(node.module)
    ]
    assert not missing, f"{script.relative_to(ROOT)} imports {', '.join(missing)}: import it from where it is now"
