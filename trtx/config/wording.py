"""Formats values for use in a sentence, and several findings as a list."""

from __future__ import annotations

import re
from collections.abc import Sequence

LONGEST = 80
LIST_ITEM = "\n  - "  # precedes each finding in a list of several
_SCHEME, _PATH = re.compile(r"([a-z]{1,8})://"), re.compile(r"[/?#]")


def shown(value: object, longest: int = LONGEST) -> str:
    """Returns ``str(value)`` on one line; text longer than ``longest`` characters loses its middle."""
    text = str(value)
    if len(text) > 2 * longest:
        text = text[:longest] + text[-longest:]  # printable() only lengthens text, so the ends suffice
    return _cut(printable(text), longest)


def quoted(value: object, longest: int = LONGEST) -> str:
    """Returns ``repr(value)`` on one line; long text loses its middle."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python turns into text
        text = "a number of thousands of digits"
    return shown(text, longest)


def shown_address(url: str) -> str:
    """Returns an address, quoted, without the parts that may hold a secret: user and password, path, query.

    ``url`` need not be a valid address.
    """
    scheme, mark, rest = url.rpartition("@")[2].rpartition("://")
    if "@" in url:
        found = _SCHEME.match(url)
        scheme, mark = ("", "") if found is None else (found[1], "://")
    safe = scheme + mark + _PATH.split(rest)[0]
    return quoted(safe) if safe == url else f"{quoted(safe)} and more, which may be a secret and is not shown"


def counted(count: int, noun: str) -> str:
    """Returns ``1 sample`` or ``2,000 samples``. The noun must form its plural with an s."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def with_article(noun: str) -> str:
    """Returns ``an agg worker`` or ``a decode worker``, depending on the first letter of the noun."""
    return f"{'an' if noun[:1] in 'aeio' else 'a'} {noun}"


def printable(text: str) -> str:
    """Escapes control characters, line ends and lone surrogates, so that a message can't control the terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = (longest - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def a_kind(value: object) -> str:
    """Returns the kind of a JSON or YAML value with its article: ``a map``, ``a whole number``."""
    if value is None:
        return "null"
    return _KINDS.get(type(value), f"a {type(value).__name__}")


_KINDS: dict[type, str] = {
    dict: "a map",
    list: "a list",
    tuple: "a list",
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}


def with_list(problem: str, findings: Sequence[str]) -> str:
    """``problem: finding``, or for several findings the problem with one line for each."""
    if len(findings) == 1:
        return f"{problem}: {findings[0]}"
    return f"{problem}:{''.join(map(LIST_ITEM.__add__, findings))}"
