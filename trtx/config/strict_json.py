"""JSON as RFC 8259 has it: what Python takes beside it is refused, and so are two equal keys, of which it keeps one."""

from __future__ import annotations

import json
from typing import Any

from trtx.config.wording import quoted


def parse_json(text: str) -> Any:
    """Raises ValueError: what is wrong; RecursionError for levels beyond what Python reads."""
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_each_once)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise ValueError(f"{quoted(twice)} stands twice in one object; keep one")
    return found
