"""What tests import of trtx is there, also in files that hold proofs alone, which `make test` does not collect."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(path for path in TESTS.rglob("*.py") if "standin" not in path.parts and "gpu" not in path.parts)


def missing(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level or not (node.module or "").startswith("trtx"):
            continue
        assert node.module is not None
        module = importlib.import_module(node.module)
        found += [
            f"{node.module}.{alias.name}"
            for alias in node.names
            if not hasattr(module, alias.name) and importlib.util.find_spec(f"{node.module}.{alias.name}") is None
        ]
    return found


@pytest.mark.slow
def test_every_name_that_a_test_imports_of_trtx_exists() -> None:
    found = {
        str(path.relative_to(TESTS)): names
        for path in FILES
        if (names := missing(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert not found
