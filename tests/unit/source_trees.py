"""The syntax trees of trtx's sources, for the tests that read them: all are parsed once in a process."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Mapping, Sequence
from pathlib import Path

import trtx

ROOT = Path(trtx.__file__).parent
FILES = tuple(sorted(ROOT.rglob("*.py")))


def nodes_of(path: Path) -> Sequence[ast.AST]:
    """All of one of :data:`FILES`, its module first."""
    return parse()[path]


@functools.cache
def parse() -> Mapping[Path, Sequence[ast.AST]]:
    """Parses all of :data:`FILES`.

    The trees stay to the end. No garbage collection looks at them, which would take three quarters of the time.
    """
    gc.disable()
    try:
        return {path: tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in FILES}
    finally:
        gc.freeze()
        gc.enable()
