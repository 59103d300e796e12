"""Checks local data files before lm-eval's libraries read them.

Those libraries don't report line numbers and silently keep one of two equal keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from trtx.config.strict_json import parse_json
from trtx.config.wording import a_kind, quoted, shown

FORMATS = ("json", "csv", "parquet", "text", "arrow")
_PATTERN_OR_ADDRESS = re.compile(r"[*?\[]|://")
_PATH = 400  # maximum characters of a path in a sentence
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def problem_of(config: Mapping[str, Any]) -> str | None:
    """The problem with the first unreadable data file of a task; None if none is found.

    ``config``: the task's. Values that aren't local paths, such as patterns or URLs, are left to the library.
    """
    if config.get("dataset_path") not in FORMATS:
        return None
    for path in _files(config):
        if not path.exists():
            return f"its data file {shown(path, _PATH)} is not there; put it there, or name another in data_files"
        if path.is_file() and not _has_line(path):
            return f"{shown(path, _PATH)} has no rows; expected one at least, with every field that the task names"
        if config["dataset_path"] == "json" and path.is_file() and (problem := _json_problem(path)) is not None:
            return problem
    return None


def _files(config: Mapping[str, Any]) -> Iterator[Path]:
    told = (config.get("dataset_kwargs") or {}).get("data_files") or []
    for of_split in told.values() if isinstance(told, Mapping) else [told]:
        for name in [of_split] if isinstance(of_split, str) else of_split:
            if not _PATTERN_OR_ADDRESS.search(str(name)):
                yield Path(str(name))


def _has_line(path: Path) -> bool:
    with path.open("rb") as lines:
        return any(line.strip() for line in lines)


def _json_problem(path: Path) -> str | None:
    """Accepts one row per line, or one document over several lines."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return f"{shown(path, _PATH)}, line {line} is not UTF-8; expected JSON, mend it"
    found = next(_line_problems(text), None)
    if found is None:
        return None
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        line, problem = found
        return f"{shown(path, _PATH)}, line {line} {problem}; expected a JSON object with the row's fields, mend it"
    try:
        parse_json(text)
    except ValueError as error:
        return f"{shown(path, _PATH)} can't be read ({shown(error)}); mend it"
    return None


def _line_problems(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found = parse_json(line)
        except (ValueError, RecursionError) as error:
            yield number, f"can't be read ({shown(error)})"
        else:
            if not isinstance(found, dict):
                yield number, f"holds {a_kind(found)}"


def problem_of_yaml(path: Path) -> str | None:
    """Returns why a task's file is invalid; None if it is valid.

    lm-eval 0.4.13 skips a file that it can't read, and uses the last of two equal keys. Its tags, such as
    ``!function``, aren't checked.
    """
    where = shown(path, _PATH)
    try:
        found = yaml.compose(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        return f"{where}{line}: this is not YAML ({shown(error.problem or error.context)}); mend it"
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        return f"{where} can't be read ({shown(error)}); mend it"
    if not isinstance(found, yaml.MappingNode):
        return f"{where} holds no keys; expected those of a task, such as task, dataset_path and doc_to_text"
    seen: set[str] = set()
    for key, _ in found.value:
        if key.value in seen:
            line = key.start_mark.line + 1
            return f"{where}, line {line}: {quoted(str(key.value))} occurs twice; keep one"
        seen.add(str(key.value))
    return None
