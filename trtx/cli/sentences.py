"""Sentences of trtx: on a terminal they end between words, elsewhere each is one line, byte for byte.

What a reader copies stays in one piece, whatever its length: a path, an address, an option, what stands in quotes or
brackets, and a command of trtx that ends a sentence. The terminal breaks what is longer than its line, and gives it
back whole.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Iterator
from typing import IO

import typer

_NARROWEST = 20  # columns; a terminal of 0 does not know
# An apostrophe in what is quoted, as of client's, ends nothing.
_CLOSING = {mark: re.compile(rf"{mark}(?!\w)") for mark in "'\""}
_LEAD = re.compile(r"\s*(?:- )?")  # of a line of a list, under which its others begin
_COMMAND = re.compile(r"(?<=: )trtx [^;()]*$")


def tell(text: str) -> None:
    """On standard error."""
    typer.echo(wrapped(text), err=True)


def wrapped(text: str, stream: IO[str] | None = None) -> str:
    """As it is shown on ``stream``, standard error by default: each of its lines broken between words to the width of
    a terminal, and untouched where it is none."""
    width = _columns(sys.stderr if stream is None else stream)
    if width is None:
        return text
    return "\n".join(line for one in text.split("\n") for line in fill(one, width))


def fill(line: str, width: int, *, indent: str | None = None) -> list[str]:
    """Lines of at most ``width`` columns, as far as no word is longer. ``indent``: of all but the first; by default
    they begin where the text of the first does, behind its spaces and the dash of a list."""
    lead = (_LEAD.match(line) or [""])[0]
    indent = " " * len(lead) if indent is None else indent
    lines, current, used = [], lead, _cells(lead)
    is_empty = True
    for gap, word in _words(line[len(lead) :]):
        if not is_empty and used + _cells(gap + word) > width:
            lines.append(current)
            current, used, gap = indent, _cells(indent), ""
        current, used = current + gap + word, used + _cells(gap + word)
        is_empty = False
    return [*lines, current]


def _words(text: str) -> Iterator[tuple[str, str]]:
    """Each with the spaces before it."""
    whole, at = _whole(text), 0
    while at < len(text):
        start = at
        while at < len(text) and text[at].isspace():
            at += 1
        gap, start = text[start:at], at
        while at < len(text) and not text[at].isspace():
            at = whole.get(at, at + 1)
        yield gap, text[start:at]


def _whole(text: str) -> dict[int, int]:
    """What stays in one piece beside words, the end of each by its start."""
    command = _COMMAND.search(text)
    found, opened, at = {} if command is None else {command.start(): len(text)}, list[int](), 0
    while at < len(text):
        if (quote := _CLOSING.get(text[at])) and not text[max(0, at - 1)].isalnum():
            closing = quote.search(text, at + 1)
            if closing is not None:
                found[at] = closing.end()
                at = closing.end()
                continue
        elif text[at] in "{[":
            opened.append(at)
        elif text[at] in "}]" and opened:
            found[opened.pop()] = at + 1
        at += 1
    return found


def _cells(text: str) -> int:
    """Columns that it takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "WF") for one in text)


def _columns(stream: IO[str]) -> int | None:
    """Of the terminal that ``stream`` is; None where it is none."""
    try:
        if not stream.isatty():
            return None
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # closed, or replaced by what has no descriptor
        return None
    said = os.environ.get("COLUMNS", "")
    columns = int(said) if said.isdecimal() else columns
    return columns if columns >= _NARROWEST else None
