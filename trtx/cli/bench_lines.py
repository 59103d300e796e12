"""Lines of ``trtx bench`` on standard error: on a terminal they end between words, as those of its tables do."""

from __future__ import annotations

import os
import sys
import textwrap

import typer

_NARROWEST = 20  # columns; a terminal of 0 does not know


def tell(text: str) -> None:
    """Elsewhere than on a terminal a line stays one, for whoever looks for it in a log."""
    typer.echo(wrapped(text), err=True)


def wrapped(text: str) -> str:
    """A word that is longer than a line, such as a path, is left to the terminal, from which it is copied whole."""
    width = _columns()
    if width is None:
        return text
    return "\n".join(
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in text.split("\n")
    )


def _columns() -> int | None:
    """Of the terminal that standard error is; None where it is none."""
    try:
        if not sys.stderr.isatty():
            return None
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # closed, or replaced by what has no descriptor
        return None
    said = os.environ.get("COLUMNS", "")
    columns = int(said) if said.isdecimal() else columns
    return columns if columns >= _NARROWEST else None
