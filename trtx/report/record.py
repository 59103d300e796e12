"""The files of a run directory that say what was asked: trtx's own, so one that does not read as such was cut short, or
is another's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from trtx.errors import UsageError


class _Attach(BaseModel):
    url: str
    model: str | None = None


class _LoadCell(BaseModel):
    concurrency: int
    request_count: int
    warmup_request_count: int


class _Load(BaseModel):
    concurrency: list[int]
    isl: int
    osl: int
    ignore_eos: bool
    streaming: bool
    cells: list[_LoadCell]


class _Record(BaseModel):
    """What a report takes from ``run.lock.yaml``; the rest of it is `trtx.experiment`'s."""

    modes: list[str]
    load: _Load
    attach: _Attach | None = None


def read_record(path: Path) -> dict[str, Any]:
    """``run.lock.yaml``; empty where there is none. Raises UsageError."""
    document = _read(path, yaml.safe_load)
    if document:
        try:
            _Record.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise _unreadable(path, f"{field[:100]}: {first['msg'][:200]}") from error
    return document


def read_json(path: Path) -> dict[str, Any]:
    """``plan.json`` or ``env.json``; empty where there is none. Raises UsageError."""
    return _read(path, json.loads)


def _read(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        document = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise _unreadable(path, " ".join(str(error).split())[:300]) from error
    if not isinstance(document, dict) or not document:
        raise _unreadable(path, f"it holds a {type(document).__name__}, not fields")
    return document


def _unreadable(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"{path} can't be read as trtx bench wrote it ({reason}); the cells beside it are whole, "
        "so put the file back from a copy, or start a new run"
    )
