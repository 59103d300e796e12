"""Validation of field values: each check returns the value in its plain Python type, or raises with what was expected.

numpy numbers become int and float, so that every accepted value can be sent to the engine.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

MAX_LOGPROBS = 1024
"""Limit of alternatives for each token.

A whole vocabulary would be 150,000 objects for each token, created in the step that all requests share.
"""
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 256
"""In characters.

The single thread that delivers all requests' tokens compares every new token with all stop strings: at both limits this
takes up to 1.3 ms for each token, measured on one core of an AMD EPYC.
"""
MAX_TOKEN_ID = 2**31 - 1
"""Token ids are 32-bit on every device; the engine checks them against its vocabulary."""


class Unsuitable(ValueError):
    """A value is not accepted; the text describes what was expected."""


def shown(value: Any) -> str:
    """Formats any value for a message, shortened."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


_LONGEST_SHOWN = 200
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def integer(low: int, high: int | None = None, *, optional: bool = True) -> Callable[[Any], int | None]:
    expected = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"

    def check(value: Any) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise Unsuitable(expected)
        number = int(value)
        if number < low or (high is not None and number > high):
            raise Unsuitable(expected)
        return number

    return check


def count_or_flag(value: Any) -> int | None:
    """Accepts a count or a flag: TensorRT-LLM's examples write True for 1; False means None."""
    if isinstance(value, bool):
        return 1 if value else None
    return _COUNT(value)


_COUNT = integer(0, MAX_LOGPROBS)


def number(low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> Callable[[Any], float | None]:
    """Accepts finite numbers from ``low`` to ``high``; with ``above``, ``low`` itself is excluded."""
    bounds = ""
    if low > -math.inf:
        bounds = f" above {low:g}" if above else f" from {low:g} to {high:g}"
    expected = f"a finite number{bounds}"

    def check(value: Any) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, Real):
            raise Unsuitable(expected)
        try:
            given = float(value)
        except OverflowError:
            raise Unsuitable(expected) from None
        if not math.isfinite(given) or not low <= given <= high or (above and given == low):
            raise Unsuitable(expected)
        return given

    return check


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Unsuitable("True or False")
    return value


def token_ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    expected = f"a list of token ids from 0 to {MAX_TOKEN_ID}"
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise Unsuitable(expected)
    try:
        return [_TOKEN_ID(token_id) for token_id in value]  # type: ignore[misc]  # not optional: never None
    except Unsuitable:
        raise Unsuitable(expected) from None


_TOKEN_ID = integer(0, MAX_TOKEN_ID, optional=False)


def strings(value: Any) -> Any:
    """Accepts a string or a list of strings; returns it in the same form."""
    if value is None:
        return None
    given = [value] if isinstance(value, str) else value
    fits = isinstance(given, (list, tuple)) and len(given) <= MAX_STOP_STRINGS
    if not fits or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_STRING_LENGTH and is_text(s) for s in given):
        raise Unsuitable(
            f"at most {MAX_STOP_STRINGS} non-empty strings of at most {MAX_STOP_STRING_LENGTH} characters each"
        )
    return value if isinstance(value, str) else list(given)


def is_text(string: str) -> bool:
    """Whether a string is valid Unicode: tokenizers and wire formats accept no surrogates."""
    return string.isascii() or not any("\ud800" <= character <= "\udfff" for character in string)


def only(*harmless: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if any(value is allowed or (type(value) is type(allowed) and value == allowed) for allowed in harmless):
            return value
        raise Unsuitable(
            f"{harmless[0]!r}: the torch engine does not support it; leave it out, or use the tensorrt-llm engine"
        )

    return check
