"""Hooks of mkdocs, which ``mkdocs.yml`` names: where the code on a page may break into the next line.

Without them a browser breaks ``--dry-run`` after its first dashes, a long name in a table at any letter, and the lines
of a tree or of columns, which then mean nothing.
"""

from __future__ import annotations

import re
from typing import Any

_TABLE = re.compile(r"(<table>.*?</table>)", re.DOTALL)
_CODE = re.compile(r"(?<=<code>)(.*?)(?=</code>)", re.DOTALL)
_ALIGNED = re.compile(r"<code>(?=[^<]*[├└]|(?:[^<]*\S {3,}\S){3})")
_TAG = re.compile(r"(<[^>]+>)")
_OPTION = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")
_FIRST_WORD = re.compile(r"(?<![\w-])--?[a-zA-Z]\w*")
_BREAK_AFTER = re.compile(r"(?<=\w[_/])(?=\w)")


def on_page_content(html: str, **_: Any) -> str:
    """Returns the page's HTML with whole options, aligned blocks that don't wrap, and breaks after ``_`` in tables."""
    parts = _TABLE.split(_ALIGNED.sub('<code class="aligned">', html))  # every second one is a table
    return "".join(_CODE.sub(_in_table if at % 2 else _in_text, part) for at, part in enumerate(parts))


def _in_text(code: re.Match[str]) -> str:
    return _map_text(code[0], lambda text: _kept_whole(_OPTION, text))


def _in_table(code: re.Match[str]) -> str:
    return _map_text(code[0], lambda text: _kept_whole(_FIRST_WORD, _BREAK_AFTER.sub("<wbr>", text)))


def _kept_whole(pattern: re.Pattern[str], text: str) -> str:
    return pattern.sub(r'<span class="whole">\g<0></span>', text)


def _map_text(html: str, change: Any) -> str:
    """Applies ``change`` to the text between tags."""
    parts = _TAG.split(html)  # every second one is a tag
    return "".join(part if at % 2 else change(part) for at, part in enumerate(parts))
