"""A JSON parser that accepts only RFC 8259.

It refuses the extensions that Python's parser accepts, and duplicate keys, of which Python's parser keeps the last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trtx.config.wording import quoted, shown


def parse_json(text: str) -> Any:
    """Parses ``text``. Raises ValueError for invalid JSON, and RecursionError if it is nested too deeply for Python."""
    return json.loads(
        text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole, object_pairs_hook=_each_once
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    """Refuses numbers such as 1e999: valid JSON that Python reads as infinity, which would decide any comparison."""
    if math.isinf(number := float(text)):
        raise ValueError(f"{shown(text)} is larger than any number that can be computed with")
    return number


def _whole(text: str) -> int:
    """Refuses integers beyond the range of a float: pydantic converts them to infinity in a float field."""
    _finite(text)
    return int(text)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise ValueError(f"{quoted(twice)} occurs twice in one object; keep one")
    return found


M = TypeVar("M", bound=BaseModel)


def validate_strictly(model: type[M], document: Mapping[str, Any]) -> M:
    """Validates a parsed YAML or JSON document as a ``model``, without conversions between text, numbers and booleans.

    An integer is accepted for a float, and ``document`` may contain Path objects. Raises pydantic's ValidationError.

    In its lax mode pydantic accepts "yes" and 1.0 for true, and true for 1. In strict mode it makes tuples and paths
    only from JSON, so the document passes through JSON. There, pydantic 2.13 does not pass the field's name to
    validators; on their errors the document is validated a second time as Python objects, for messages with names.
    """
    try:
        return model.model_validate_json(json.dumps(document, default=str), strict=True)
    except ValidationError as error:
        if not error.errors()[0]["type"].endswith("_type"):
            model.model_validate(document)  # raises the same error, with field names
        raise
