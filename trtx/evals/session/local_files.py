"""A person's own data files, looked at before lm-eval's library reads them: it tells no line, and of two equal keys it
keeps one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trtx.config.strict_json import parse_json
from trtx.config.wording import a_kind, shown

FORMATS = ("json", "csv", "parquet", "text", "arrow")


def problem_of(config: Mapping[str, Any]) -> str | None:
    """What is wrong with the first of a task's data files that can't be read as it stands; None where nothing is seen.

    ``config``: of the task. What is no path here, such as a pattern or an address, is left to the library.
    """
    if config.get("dataset_path") not in FORMATS:
        return None
    for path in _files(config):
        if not _has_line(path):
            return f"{shown(path)} has no rows; expected one at least, with every field that the task names"
        if config["dataset_path"] == "json" and (problem := _json_problem(path)) is not None:
            return problem
    return None


def _files(config: Mapping[str, Any]) -> Iterator[Path]:
    told = (config.get("dataset_kwargs") or {}).get("data_files") or []
    for of_split in told.values() if isinstance(told, Mapping) else [told]:
        for name in [of_split] if isinstance(of_split, str) else of_split:
            if (path := Path(str(name))).is_file():
                yield path


def _has_line(path: Path) -> bool:
    with path.open("rb") as lines:
        return any(line.strip() for line in lines)


def _json_problem(path: Path) -> str | None:
    """A row a line, or one document over several lines."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return f"{shown(path)}, line {line} is not UTF-8; expected JSON, mend it"
    found = next(_line_problems(text), None)
    if found is None:
        return None
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        line, problem = found
        return f"{shown(path)}, line {line} {problem}; expected a JSON object with the row's fields, mend it"
    try:
        parse_json(text)
    except ValueError as error:
        return f"{shown(path)} can't be read ({shown(error)}); mend it"
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
