"""JSON as RFC 8259 has it: what Python takes beside it is refused, and so are two equal keys, of which it keeps one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trtx.config.wording import quoted, shown


def parse_json(text: str) -> Any:
    """Raises ValueError: what is wrong; RecursionError for levels beyond what Python reads."""
    return json.loads(
        text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole, object_pairs_hook=_each_once
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    """1e999 is a number of JSON that Python reads as infinity, and what is compared with that passes or fails by it."""
    if math.isinf(number := float(text)):
        raise ValueError(f"{shown(text)} is larger than any number that can be computed with")
    return number


def _whole(text: str) -> int:
    """Where a fraction may stand, pydantic makes infinity of a whole number that is as large."""
    _finite(text)
    return int(text)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise ValueError(f"{quoted(twice)} stands twice in one object; keep one")
    return found


M = TypeVar("M", bound=BaseModel)


def validate_strictly(model: type[M], document: Mapping[str, Any]) -> M:
    """What a reader of YAML or JSON gave, as a ``model``: no text, number or boolean stands for another. A whole number
    is a number too. Paths may be among it. Raises pydantic's ValidationError.

    Left to itself pydantic takes "yes" and 1.0 for true, and true for 1. It is strict and still makes tuples and paths
    of JSON alone, where validators of 2.13 are not told the name of their field.
    """
    try:
        return model.model_validate_json(json.dumps(document, default=str), strict=True)
    except ValidationError as error:
        if not error.errors()[0]["type"].endswith("_type"):
            model.model_validate(document)  # raises the same, with names
        raise
