"""Checks YAML values against the types and ranges of ``llm_args.json``, such as ``list[int] | None`` and ``0..1``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

Allowed = tuple[object, ...] | str | None

_SCALARS: dict[str, Callable[[object], bool]] = {
    "None": lambda value: value is None,
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "list": lambda value: isinstance(value, list),
    "dict": lambda value: isinstance(value, Mapping),
}
_ITEMS = re.compile(r"(?:list|set)\[(.+)\]")
_PAIRS = re.compile(r"dict\[(.+?),\s*(.+)\]")


def model_of(type_: str) -> str | None:
    """Returns the nested model in a type, such as ``KvCacheConfig`` for ``KvCacheConfig | None``, or None."""
    found = re.search(r"\b([A-Z]\w*Config)\b", type_)
    return found.group(1) if found else None


def type_problem(type_: str, value: object) -> str | None:
    """Returns None if ``value`` fits ``type_``, else the expected type."""
    return None if any(_fits(part.strip(), value) for part in type_.split(" | ")) else type_


def _fits(type_: str, value: object) -> bool:
    if type_ in _SCALARS:
        return _SCALARS[type_](value)
    if items := _ITEMS.fullmatch(type_):
        return isinstance(value, (list, set, tuple)) and all(_fits(items.group(1), item) for item in value)
    if pairs := _PAIRS.fullmatch(type_):
        key, item = pairs.groups()
        return isinstance(value, Mapping) and all(_fits(key, k) and _fits(item, v) for k, v in value.items())
    if type_.endswith("Config"):
        return isinstance(value, Mapping)
    return True  # a Python object, which only callers of the LLM API can pass


# Ranges as llm_args.json spells them, each with its check(value, bounds). Other text is prose and can't be checked.
_RANGES: tuple[tuple[str, Callable[[float, list[float]], bool]], ...] = (
    (r"([-\d.]+)\.\.([-\d.]+)", lambda value, bound: bound[0] <= value <= bound[1]),
    (r">=\s*([-\d.]+)", lambda value, bound: value >= bound[0]),
    (r"(?:each )?>\s*([-\d.]+)", lambda value, bound: value > bound[0]),
    (r"([-\d.]+) < x <= ([-\d.]+)", lambda value, bound: bound[0] < value <= bound[1]),
    (r"([-\d.]+) <= x < ([-\d.]+)", lambda value, bound: bound[0] <= value < bound[1]),
)


def range_problem(allowed: Allowed, value: object, *, ignore_case: bool = False) -> str | None:
    """Returns None if ``value``, or each item of a list, is allowed, else a description of the allowed values."""
    if value is None or allowed is None or isinstance(value, Mapping):
        return None
    if allowed == "sums to 1":
        fits = isinstance(value, list) and math.isclose(sum(value), 1.0, abs_tol=1e-6)
        return None if fits else "numbers that sum to 1"
    items = value if isinstance(value, list) else [value]
    return next((problem for item in items if (problem := _item_problem(allowed, item, ignore_case))), None)


def _item_problem(allowed: tuple[object, ...] | str, value: object, ignore_case: bool) -> str | None:
    if isinstance(allowed, tuple):
        fits = value in allowed or isinstance(value, (bool, int)) or (ignore_case and str(value).upper() in allowed)
        return None if fits else "one of " + ", ".join(map(str, allowed))
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    for pattern, holds in _RANGES:
        if bounds := re.fullmatch(pattern, allowed):
            return None if holds(value, [float(bound) for bound in bounds.groups()]) else allowed
    return None
