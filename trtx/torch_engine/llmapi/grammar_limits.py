"""Limits of a grammar's text. A grammar beyond them is refused before it reaches the compiler.

They bound the time of a compilation to about a second and of a mask to some milliseconds, on one core.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from math import lcm
from typing import Any

from trtx.torch_engine.llmapi.pattern_length import required_length
from trtx.torch_engine.llmapi.values import shown
from trtx.torch_engine.sampling_plan import LARGEST_FLOAT, GrammarKind

MAX_GRAMMAR_BYTES: Mapping[GrammarKind, int] = {
    "json": 256 << 10, "structural_tag": 128 << 10, "grammar": 32 << 10, "regex": 16 << 10,
}  # fmt: skip
"""Limits of a grammar's text. The states of a long regular expression, and so the masks, take time by its length."""
MAX_GRAMMAR_DEPTH = 100
"""Limit of nested objects and lists in a JSON schema; the compiler's own reader ends at 128."""
MAX_SCHEMA_TEXT = 8 << 10
"""Limit of one text of a JSON schema that the answer may have to repeat or match, in characters."""
MAX_MEMBERS = 1000
"""Limit of one object's properties and of one list of alternatives. The time to compile optional properties grows with
the square of their number: 0.4 s for 1,000. So the squares of the numbers are limited together, to that of 1,000."""
MAX_MULTIPLE = 100_000
"""Limit of the least common multiple of a schema's ``multipleOf``: the states of a number's pattern grow with it."""
MAX_REQUIRED_CHARACTERS = 10_000
"""Limit of the text that the patterns of a grammar require together. Each repetition is a state that has to
be compiled."""
_PATTERN_OF_GRAMMAR = re.compile(r"/((?:[^/\\\n]|\\.)+)/")
_NOT_MATCHED = frozenset(("description", "title", "$comment", "examples", "default", "$id", "$schema", "$ref"))
_DEFINITIONS = frozenset(("$defs", "definitions"))
_LONG_LISTS = frozenset(("enum", "required", "examples"))


def check_size(name: str, kind: GrammarKind, text: str) -> None:
    """Raises ValueError for a grammar that is too long, or whose patterns require a text that is too long."""
    if (size := len(text.encode())) > (most := MAX_GRAMMAR_BYTES[kind]):
        raise ValueError(f"GuidedDecodingParams.{name} has {size} bytes; expected at most {most}; shorten it")
    if kind == "regex":
        _check_required(name, required_length(text))
    elif kind == "grammar":
        _check_required(name, sum(required_length(pattern) for pattern in _PATTERN_OF_GRAMMAR.findall(text)))


def _check_required(name: str, characters: int) -> None:
    if characters > MAX_REQUIRED_CHARACTERS:
        raise ValueError(
            f"GuidedDecodingParams.{name} has patterns that require at least {characters} characters; expected at most "
            f"{MAX_REQUIRED_CHARACTERS}; lower the counts of their repetitions"
        )


@lru_cache(maxsize=64)  # a request checks its schema once for each of its choices, and clients send a schema often
def check_json(name: str, text: str) -> None:
    """Raises ValueError for text that isn't JSON, or whose parts are too deep, too long or too many."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"GuidedDecodingParams.{name} is not valid JSON: {error}") from None
    if isinstance(value, dict) and "x-guidance" in value:
        raise ValueError(f"GuidedDecodingParams.{name} has x-guidance, an option of one library; leave it out")
    if not isinstance(value, dict):
        raise ValueError(f"GuidedDecodingParams.{name} is {shown(text)}; expected a JSON object")
    depth, squares, multiple, required = 0, 0, 1, 0
    level: list[tuple[str, Any]] = [("", value)]
    while level:
        inner: list[tuple[str, Any]] = []
        for key, one in level:
            if isinstance(one, str):
                _check_text(name, key, one)
                if key == "pattern":
                    required += required_length(one)
            if key == "multipleOf" and isinstance(one, int | float) and 1 <= one <= LARGEST_FLOAT:
                multiple = lcm(multiple, int(one))
            if isinstance(one, dict):
                for member in one:
                    _check_text(name, "a key", member)
                    if key == "patternProperties":
                        required += required_length(member)
                if key not in _DEFINITIONS:
                    squares += _square(name, key, len(one))
                inner += one.items()
            elif isinstance(one, list):
                if key not in _LONG_LISTS:
                    squares += _square(name, key, len(one))
                inner += [(key, item) for item in one]
        level = inner
        depth += bool(level)
    if depth > MAX_GRAMMAR_DEPTH:
        raise ValueError(
            f"GuidedDecodingParams.{name} nests {depth} levels; expected at most {MAX_GRAMMAR_DEPTH}; flatten it, "
            "for example with $defs"
        )
    _check_required(name, required)
    if squares > 2 * MAX_MEMBERS**2:
        raise ValueError(
            f"GuidedDecodingParams.{name} has too many objects with hundreds of properties or alternatives; expected "
            f"at most one with {MAX_MEMBERS}, or four with {MAX_MEMBERS // 2}; shorten them"
        )
    if multiple > MAX_MULTIPLE:
        raise ValueError(
            f"GuidedDecodingParams.{name} has multipleOf with the least common multiple {shown(multiple)}; expected at "
            f"most {MAX_MULTIPLE}; leave some out"
        )


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _check_text(name: str, key: str, text: str) -> None:
    if len(text) > MAX_SCHEMA_TEXT and key not in _NOT_MATCHED:
        raise ValueError(
            f"GuidedDecodingParams.{name} has a text of {len(text)} characters in {key}; expected at most "
            f"{MAX_SCHEMA_TEXT}; shorten it"
        )


def _square(name: str, key: str, count: int) -> int:
    if count > MAX_MEMBERS:
        place = f'"{key[:100]}"' if key else "its first object"
        raise ValueError(
            f"GuidedDecodingParams.{name} has {count} entries in {place}; expected at most {MAX_MEMBERS}; shorten it"
        )
    return count**2
