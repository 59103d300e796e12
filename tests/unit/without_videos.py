"""An environment whose Python finds no PyAV, as one without the extra ``video``."""

from __future__ import annotations

from pathlib import Path

_HIDES = """
import importlib.abc, sys
class Hiding(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "av":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hiding())
"""


def pythonpath_without_pyav(directory: Path) -> str:
    """For PYTHONPATH of a process, and of those that it starts."""
    (directory / "sitecustomize.py").write_text(_HIDES, encoding="utf-8")
    return str(directory)
