"""Python, the installed packages and MPI, none of them imported."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name

from trtx.doctor.facts import Package, Software

_MPIRUN_TIMEOUT_S = 2.0


def gather_software() -> Software:
    packages: dict[str, Package] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # the first on the path is the one that is imported
            packages.setdefault(
                canonicalize_name(name), Package(distribution.version, tuple(distribution.requires or ()))
            )
    if "tensorrt-llm" not in packages and (version := _version_in("tensorrt_llm")):
        packages["tensorrt-llm"] = Package(version)
    return Software(
        python=platform.python_version(),
        requires_python=_requires_python(),
        packages=packages,
        torch_cuda=_assigned("torch", "cuda"),
        open_mpi=_open_mpi() if "tensorrt-llm" in packages else None,
    )


def _requires_python() -> str | None:
    try:
        return metadata.metadata("trtx")["Requires-Python"]
    except metadata.PackageNotFoundError:
        return None


def _version_in(package: str) -> str | None:
    """For a package that lies on the path without metadata."""
    return _assigned(package, "__version__")


def _assigned(package: str, name: str) -> str | None:
    """The text that ``<package>/version.py`` assigns to ``name``. Importing torch would take seconds."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    for directory in spec.submodule_search_locations:
        try:
            text = (Path(directory) / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        if found := re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE):
            return found[1]
    return None


def _open_mpi() -> str | None:
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return None
    try:
        done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=_MPIRUN_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"(?:Open MPI|OpenRTE)\D*(\d+\.\d+(?:\.\d+)?)", done.stdout)
    return found[1] if found else None
