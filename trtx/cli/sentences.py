"""Wraps messages: on a terminal between words, elsewhere not at all, so that each stays one line.

Text that a user may copy is never broken, whatever its length: a path, an address, an option, quoted or bracketed text,
and a trtx command at the end of a sentence. The terminal itself wraps longer text and copies it in one piece.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Iterator
from typing import IO

import typer

_NARROWEST = 20  # columns; a terminal that does not know its width reports 0
# An apostrophe inside quoted text, as in client's, does not end the quotation.
_CLOSING = {mark: re.compile(rf"{mark}(?!\w)") for mark in "'\""}
_LEAD = re.compile(r"\s*(?:- )?")  # the indentation and dash of a list item; continuation lines align behind it
_COMMAND = re.compile(r"(?<=: )trtx [^;()]*$")


def tell(text: str) -> None:
    """Prints text to stderr, wrapped."""
    typer.echo(wrapped(text), err=True)


def wrapped(text: str, stream: IO[str] | None = None) -> str:
    """Wraps each line to the width of the terminal ``stream`` (default: stderr); unchanged if it is not a terminal."""
    width = _columns(sys.stderr if stream is None else stream)
    if width is None:
        return text
    return "\n".join(line for one in text.split("\n") for line in fill(one, width))


def fill(line: str, width: int, *, indent: str | None = None) -> list[str]:
    """Breaks a line into lines of at most ``width`` columns, unless a word is longer.

    ``indent``: the indentation of all lines but the first; by default they align with the text of the first line, after
    its spaces and the dash of a list item.
    """
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
    """Yields each word with the whitespace before it."""
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
    """Returns the start -> end positions of the parts that must not be broken, besides single words."""
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
    """Returns the width of the text in terminal columns."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "WF") for one in text)


def _columns(stream: IO[str]) -> int | None:
    """Returns the width of the terminal ``stream``; None if it is not a terminal or too narrow."""
    try:
        if not stream.isatty():
            return None
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # the stream is closed or has no descriptor
        return None
    variable = os.environ.get("COLUMNS", "")
    columns = int(variable) if variable.isdecimal() else columns
    return columns if columns >= _NARROWEST else None
