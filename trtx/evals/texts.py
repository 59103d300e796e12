"""The documents of ``perplexity``: the user's text from a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from trtx.config.files import read_bytes
from trtx.config.strict_json import parse_json
from trtx.config.wording import a_kind, shown
from trtx.errors import UsageError

TASK = "perplexity"
MOST_BYTES = 256 << 20  # more than an engine scores on a CPU in a day, and more than a perplexity needs
_JSON_LINES = (".jsonl", ".ndjson")
_PARAGRAPHS = re.compile(r"\n[ \t\r\f\v]*\n\s*")
_EXPECTED = 'text as UTF-8, or JSON lines (.jsonl) with a field "text" each'


def read_texts(path: Path) -> list[dict[str, Any]]:
    """The documents in a file, each with the line at which it starts, counted from 1.

    In ``.jsonl`` and ``.ndjson`` files, a document is the field ``text`` of a line; in any other file, it is a
    paragraph, separated by blank lines. Raises UsageError with file, line and error.
    """
    what, content = "--text", read_bytes(path, "--text", _EXPECTED, limit=MOST_BYTES)
    if b"\0" in content:
        line = content.count(b"\n", 0, content.index(b"\0")) + 1
        raise UsageError(f"{what} {shown(path)}, line {line} holds a NUL byte, so it is not text; expected {_EXPECTED}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{what} {shown(path)}, line {line} is not UTF-8; expected {_EXPECTED}") from error
    if path.suffix.lower() in _JSON_LINES:
        found = [
            {"text": _text_of(line, f"{what} {shown(path)}, line {number}"), "line": number}
            for number, line in enumerate(text.split("\n"), start=1)
            if line.strip()
        ]
    else:
        found = _paragraphs(text)
    if not found:
        raise UsageError(f"{what} {shown(path)} is empty; expected {_EXPECTED}")
    return found


def _paragraphs(text: str) -> list[dict[str, Any]]:
    found, at = [], 0
    for part in [*_PARAGRAPHS.finditer(text), None]:
        end = len(text) if part is None else part.start()
        if paragraph := text[at:end].strip():
            begins = at + len(text[at:end]) - len(text[at:end].lstrip())
            found.append({"text": paragraph, "line": text.count("\n", 0, begins) + 1})
        at = end if part is None else part.end()
    return found


def _text_of(line: str, where: str) -> str:
    expected = 'expected an object with text in its field "text", as {"text": "Once upon a time"}'
    try:
        row = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} can't be read as JSON ({shown(error)}); {expected}") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where} holds {a_kind(row)}; {expected}")
    if "text" not in row:
        raise UsageError(f"{where} has the fields {shown(', '.join(row)) or '(none)'}; {expected}")
    text = row["text"]
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"{where} has {shown(json.dumps(text))} as its text; expected text that is not empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{where} has half a character in its text (a lone surrogate); {expected}") from error
    return text
