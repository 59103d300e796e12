"""How a value looks inside a sentence."""

from __future__ import annotations

import re

LONGEST = 80
_SCHEME, _PATH = re.compile(r"([a-z]{1,8})://"), re.compile(r"[/?#]")


def shown(value: object, longest: int = LONGEST) -> str:
    """``value`` as text of one line, its middle cut out where it is longer than ``longest`` characters."""
    text = str(value)
    if len(text) > 2 * longest:
        text = text[:longest] + text[-longest:]  # written out they are longer: their ends are enough
    return _cut(printable(text), longest)


def quoted(value: object, longest: int = LONGEST) -> str:
    """As Python writes it, the middle of a long one cut out."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python turns into text
        text = "a number of thousands of digits"
    return shown(text, longest)


def shown_address(url: str) -> str:
    """An address, quoted, without what may be a secret in it: a user with a password, a path, a query.

    It may be none."""
    scheme, mark, rest = url.rpartition("@")[2].rpartition("://")
    if "@" in url:
        found = _SCHEME.match(url)
        scheme, mark = ("", "") if found is None else (found[1], "://")
    safe = scheme + mark + _PATH.split(rest)[0]
    return quoted(safe) if safe == url else f"{quoted(safe)} and more, which may be a secret and is not shown"


def counted(count: int, noun: str) -> str:
    """``1 sample``, ``2,000 samples``: of a noun whose plural has an s."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def with_article(noun: str) -> str:
    """``an agg worker``, ``a decode worker``: by its first letter."""
    return f"{'an' if noun[:1] in 'aeio' else 'a'} {noun}"


def printable(text: str) -> str:
    """Control characters, line ends and lone surrogates written out: a message must not steer a terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = (longest - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def a_kind(value: object) -> str:
    """What a value of JSON or YAML is, with its article: ``a map``, ``a whole number``."""
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
