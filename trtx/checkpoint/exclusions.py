"""Matches modules against the names that a quantization config excludes, by the rules of each exporter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache

from trtx.checkpoint.fp8_configs import COMPRESSED, FINE_GRAINED, REGEX

_PLAIN = re.compile(r"[\w.\-]*")  # a pattern without groups and flags, which can be one branch of a larger one
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


@lru_cache(maxsize=16)
def exclusion(method: str, excluded: tuple[str, ...]) -> Callable[[str], bool]:
    """Returns a function that says whether a module is excluded. ``method``: the exporter's ``quant_method``.

    ``fp8``: as ``should_convert_module`` of transformers 5.23, a regular expression that ends at a dot or at the end of
    the name, or a suffix. ``compressed-tensors``: a whole name, the class ``Linear``, or after ``re:`` a regular
    expression that begins the name (``match_name`` of 0.20). All others: shell wildcards, as ModelOpt writes them.
    What is no regular expression excludes nothing; ``check_fp8_config`` refuses it.
    """
    if method == FINE_GRAINED:
        plain = [pattern for pattern in excluded if _PLAIN.fullmatch(pattern)]
        branches = ["|".join(plain)] * bool(plain) + [pattern for pattern in excluded if pattern not in plain]
        begins = _compiled(rf"(?:{branch}){_BOUNDARY}" for branch in branches)
        return lambda name: name.endswith(excluded) or any(pattern.match(name) for pattern in begins)
    if method == COMPRESSED:
        names = frozenset(excluded)
        expressions = _compiled(name.removeprefix(REGEX) for name in excluded if name.startswith(REGEX))
        return lambda name: (
            name in names or "Linear" in names or any(expression.match(name) for expression in expressions)
        )
    return lambda name: any(fnmatchcase(name, pattern) for pattern in excluded)


def _compiled(expressions: Iterable[str]) -> list[re.Pattern[str]]:
    found = []
    for expression in expressions:
        with suppress(re.error):
            found.append(re.compile(expression))
    return found
