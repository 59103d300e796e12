"""``manifest.json``: the inputs and tools of a build, its timings, and its proof."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtx.build.proof import Proof
from trtx.errors import UsageError

SCHEMA_VERSION = 1
FILE = "manifest.json"
_PACKAGES = ("trtx", "torch", "transformers", "nvidia-modelopt", "tensorrt_llm")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``manifest.json``. Sizes are in bytes; ``seconds`` is by phase.

    ``inputs``: the values that the build's key is a hash of: source, format, recipe, calibration text, tool versions,
    engine configs. ``gate``: the most recently requested limit on the increase of the perplexity, and whether the build
    meets it; None if no limit was requested. ``proof``: None if the embedded engine can't run the model; ``unproved``
    is the reason.
    """

    schema_version: int
    name: str
    key: str
    created: str  # UTC, ISO 8601
    inputs: dict[str, Any]
    source: dict[str, Any]  # name, revision
    built_on: str  # the name of the GPU that built it, or CPU
    built_for: str  # the name of the GPU that the engine configs are for, or CPU
    weight_bytes: dict[str, int]  # source, result
    seconds: dict[str, float]
    proof: Proof | None
    unproved: str | None = None
    gate: dict[str, Any] | None = None

    def write(self, directory: Path) -> None:
        """Writes the file atomically: a reader sees either the old or the new content."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
        new = directory / f".{FILE}.{os.getpid()}"
        new.write_text(text, encoding="utf-8")
        new.rename(directory / FILE)


def read_manifest(directory: Path) -> Manifest:
    """Reads the manifest. Raises UsageError if it is missing or has another schema version."""
    path = directory / FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {values['schema_version']}, expected {SCHEMA_VERSION}")
        proof = values.pop("proof")
        return Manifest(**values, proof=Proof(**proof) if proof else None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} can't be read as a manifest ({error}); remove its directory and build again"
        ) from error


def key_of(inputs: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of the canonical JSON of ``inputs``."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def code_hash(*modules: str) -> str:
    """Returns the SHA-256 of the source of modules in this package, which is an input of a build like any other."""
    digest = hashlib.sha256()
    for module in modules:
        digest.update(Path(__file__).with_name(f"{module}.py").read_bytes())
    return digest.hexdigest()


def tool_versions() -> dict[str, str | None]:
    """Returns the versions of the packages that affect a build's bytes, without importing them; None: not installed."""
    return {package: _version(package) for package in _PACKAGES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
