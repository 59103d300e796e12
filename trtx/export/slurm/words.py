"""Words of a bash script: what a person or a plan gave is quoted, and the script's own variables are not."""

from __future__ import annotations

import shlex
from collections.abc import Iterable


class Shell(str):
    """Text of the script's own, such as ``${TRTX_RUN}/configs``: bash expands it, inside double quotes.

    Nothing that a person typed is ever put into one.
    """

    __slots__ = ()


def word(value: str) -> str:
    """One word of a command or an assignment, expanded by bash only where it is :class:`Shell`."""
    if isinstance(value, Shell):
        return f'"{value}"'
    plain = shlex.quote(value)
    return f"'{value}'" if plain == value and "," in value else plain  # or a list in an array looks like a mistake


def array(name: str, words: Iterable[str], indent: str = "") -> str:
    """An assignment to an array, a flag and its value in a line."""
    lines: list[str] = []
    for one in map(word, words):
        if lines and not one.startswith("-") and lines[-1].startswith("-") and " " not in lines[-1]:
            lines[-1] += f" {one}"
        else:
            lines.append(one)
    text = " ".join(lines)
    if len(text) + len(name) + len(indent) < 110:
        return f"{indent}{name}=({text})\n"
    inner = "".join(f"{indent}  {line}\n" for line in lines)
    return f"{indent}{name}=(\n{inner}{indent})\n"
