"""The result of an export for any target: the files and the information about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtx.checkpoint import Checkpoint
from trtx.config import Finding
from trtx.config.left_out import LeftOutField
from trtx.export.files import ExportedFile


@dataclass(frozen=True, slots=True)
class ExportedService:
    """The facts about an exported topology that a benchmark's load is checked against."""

    model: str  # the name that clients send
    engine: str
    engine_configs: Mapping[str, Mapping[str, Any]]  # role -> the LLM's keyword arguments
    checkpoint: Checkpoint  # on this machine, possibly without weights


@dataclass(frozen=True, slots=True)
class Part:
    """A set of identical processes of the export.

    ``where``: their number and place. The command and the environment are as in the files: values that are known only
    at run time appear as the names of variables.
    """

    name: str
    where: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Export:
    """An export.

    ``findings``: the findings about the engine configs, without errors. ``how``: instructions for the user. ``parts``
    and ``reasons``: the plan behind the files, and the reasons for it. ``left_out``: fields of the engine configs that
    the engine does not act on and that the files therefore omit.
    """

    files: tuple[ExportedFile, ...]
    findings: tuple[Finding, ...]
    how: str
    served: ExportedService
    about: str
    parts: tuple[Part, ...]
    reasons: tuple[str, ...]
    left_out: tuple[LeftOutField, ...] = ()
