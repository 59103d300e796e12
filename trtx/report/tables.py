"""Tables of text for a terminal and for Markdown, from the same heads and rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.text import Text

from trtx.report.whole_table import WholeTable


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a column. Texts may wrap on a terminal; names and numbers never do, and numbers are on the right."""

    text: str
    kind: Literal["text", "name", "number"] = "text"

    @property
    def is_number(self) -> bool:
        return self.kind == "number"


def heads(*names: str, text: Sequence[str] = (), numbers: Sequence[str] = ()) -> tuple[Head, ...]:
    """The heads of a table: the first one is a name, the others are numbers, unless ``text`` or ``numbers`` has it."""

    def kind(place: int, name: str) -> Literal["text", "name", "number"]:
        if name in text:
            return "text"
        return "number" if place or name in numbers else "name"

    return tuple(Head(name, kind(place, name)) for place, name in enumerate(names))


def terminal_table(columns: Sequence[Head], rows: Iterable[Sequence[str | Text]], caption: str = "") -> WholeTable:
    table = WholeTable(caption=caption or None)
    for head in columns:
        table.add_column(
            head.text,
            justify="right" if head.is_number else "left",
            overflow="fold" if head.kind == "text" else "ellipsis",
            no_wrap=head.kind != "text",
        )
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(columns: Sequence[Head], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(head.text for head in columns)} |",
        f"|{'|'.join('--:' if head.is_number else '---' for head in columns)}|",
        *(f"| {' | '.join(map(table_cell, row))} |" for row in rows),
    ]


def table_cell(text: str) -> str:
    """Text escaped for a Markdown table."""
    return markdown_line(text).replace("|", "\\|")


def markdown_line(text: str) -> str:
    """Text on one line, with "<" escaped: Markdown would treat a server's text as HTML and hide it."""
    return " ".join(text.split()).replace("<", "\\<")
