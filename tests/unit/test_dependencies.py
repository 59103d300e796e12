"""Every package that trtx imports is declared in pyproject.toml: others may stop bringing it."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from source_trees import FILES, nodes_of

BROUGHT = {"triton", "cuda", "pydantic_core"}
"""Packages whose version another one fixes: torch on CUDA (triton and cuda-bindings), and pydantic."""
PACKAGE_OF = {"cudnn": "nvidia-cudnn-frontend"}
"""Names in the index of modules that are not installed here."""
ROOT = Path(__file__).parents[2]


def imported() -> set[str]:
    found: set[str] = set()
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"trtx"} - BROUGHT


@pytest.mark.slow
def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name, one in extras.items() if name != "dev" for line in one)]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    brought = {name: [package] for name, package in PACKAGE_OF.items()} | dict(packages_distributions())
    lacking = {
        name for name in imported() if not declared & {canonicalize_name(one) for one in brought.get(name, [name])}
    }
    assert not lacking, f"declare in pyproject.toml what trtx imports: {sorted(lacking)}"
