"""Quotes the words of a bash script: values from the user or the plan are literal, the script's variables expand."""

from __future__ import annotations

import shlex
from collections.abc import Iterable


class Shell(str):
    """Text that bash expands, inside double quotes, such as ``${TRTX_RUN}/configs``.

    It never contains user input.
    """

    __slots__ = ()


def word(value: str) -> str:
    """Returns one quoted word of a command or an assignment, which bash expands only if it is a :class:`Shell`."""
    if isinstance(value, Shell):
        return f'"{value}"'
    plain = shlex.quote(value)
    return f"'{value}'" if plain == value and "," in value else plain  # an unquoted comma in an array looks wrong


def array(name: str, words: Iterable[str], indent: str = "") -> str:
    """Returns a bash array assignment, with each flag and its value on one line if it is long."""
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
