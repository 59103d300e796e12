"""``manifest.json``: what a build was made from, with what, how long it took, and how far it can be trusted."""

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
    """All of it is JSON. Sizes in bytes, ``seconds`` by phase.

    ``inputs``: what the build's key is the hash of: source, format, recipe, calibration text, tool versions, engine
    configs. ``gate``: the limit on the perplexity's increase that was asked for last and whether it was kept; None
    where nobody asked. ``proof``: None where the embedded engine can't run the model; ``unproved`` says why.
    """

    schema_version: int
    name: str
    key: str
    created: str  # UTC, ISO 8601
    inputs: dict[str, Any]
    source: dict[str, Any]  # name, revision
    built_on: str  # the GPU's name, or CPU
    built_for: str  # the same, of the GPU that the engine configs are for
    weight_bytes: dict[str, int]  # source, result
    seconds: dict[str, float]
    proof: Proof | None
    unproved: str | None = None
    gate: dict[str, Any] | None = None

    def write(self, directory: Path) -> None:
        """Atomically: a reader finds the old file or the new one."""
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
        new = directory / f".{FILE}.{os.getpid()}"
        new.write_text(text, encoding="utf-8")
        new.rename(directory / FILE)


def read_manifest(directory: Path) -> Manifest:
    """Raises UsageError where there is none, or one of another schema."""
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
    """SHA-256 of the canonical JSON of ``inputs``."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def code_hash(*modules: str) -> str:
    """SHA-256 of the text of modules beside this one: what they do decides a build's bytes as any input does."""
    digest = hashlib.sha256()
    for module in modules:
        digest.update(Path(__file__).with_name(f"{module}.py").read_bytes())
    return digest.hexdigest()


def tool_versions() -> dict[str, str | None]:
    """Of the packages that decide a build's bytes; None for one that is not installed. Imports none of them."""
    return {package: _version(package) for package in _PACKAGES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
