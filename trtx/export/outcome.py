"""What an export comes to, whatever it is for: files, and all that is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtx.checkpoint import Checkpoint
from trtx.config import Finding
from trtx.config.left_out import LeftOutField
from trtx.export.files import ExportedFile


@dataclass(frozen=True, slots=True)
class Served:
    """What an export serves, as a load is held against it."""

    model: str  # the name that clients send
    engine: str
    engine_configs: Mapping[str, Mapping[str, Any]]  # role -> the LLM's keyword arguments
    checkpoint: Checkpoint  # as it is here, weights or not


@dataclass(frozen=True, slots=True)
class Part:
    """Processes that are alike, as they will be started. ``where``: how many, on what; words and values as the files
    have them, with what is known only where they run by its name there."""

    name: str
    where: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Export:
    """``findings``: of the engine configs, none of them an error. ``how``: what to do with the files, for a person.
    ``parts`` and ``reasons``: the plan that they are made of, and why it is so. ``left_out``: of the engine configs,
    what the engine does not act on, which no file has."""

    files: tuple[ExportedFile, ...]
    findings: tuple[Finding, ...]
    how: str
    served: Served
    about: str
    parts: tuple[Part, ...]
    reasons: tuple[str, ...]
    left_out: tuple[LeftOutField, ...] = ()
