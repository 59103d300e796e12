"""The installed TensorRT-LLM version, found without importing the package, which takes seconds and starts MPI."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "tensorrt_llm"
_ASSIGNMENT = re.compile(r"""^__version__\s*=\s*["']([^"']+)["']""", re.MULTILINE)


def installed_version() -> str | None:
    """Version of the package that ``import tensorrt_llm`` would find; None if there is none.

    Reads its ``version.py`` first, because the metadata may belong to another installation than the first on the path.
    Returns ``"unknown"`` for a package with neither.
    """
    spec = find_spec(PACKAGE)
    if spec is None:
        return None
    for directory in spec.submodule_search_locations or ():
        path = Path(directory) / "version.py"
        if path.is_file() and (found := _ASSIGNMENT.search(path.read_text(encoding="utf-8"))):
            return found.group(1)
    from importlib import metadata  # imported here: it takes 14 ms, which --help and the guardian need not spend

    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return "unknown"


def needs_gpu(version: str) -> bool:
    """False for a build with the local version ``cpu``, such as the tests' stand-in (``1.3.0rc22+cpu``)."""
    return version.partition("+")[2] != "cpu"
