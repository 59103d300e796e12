"""Readers for single values of Dynamo's request, with the protocol's ranges.

The ranges are the same for all engines and lie within what the torch engine accepts, which a test checks. Of
TensorRT-LLM's own ranges, only those of ``temperature``, ``top_k`` and ``top_p`` are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Reader = Callable[[str, Any], Any]
"""Converts a field's value (not None) to the LLM API's; called with name and value. Raises InvalidValue."""


class InvalidValue(ValueError):
    """A value has the wrong type or is out of range. The message, for the client, names field, value and range."""


def number(low: float, high: float, *, above: bool = False) -> Reader:
    """Reader of a float in ``[low, high]``, or with ``above`` in ``(low, high]``.

    Values are rounded to 7 digits, because the wire is float32 (0.7 arrives as 0.699999988).
    """
    span = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"

    def read(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidValue(f"{name} is {value!r}, expected a number {span}")
        rounded = float(f"{value:.7g}")
        if not math.isfinite(rounded) or not low <= rounded <= high or (above and rounded == low):
            raise InvalidValue(f"{name} is {rounded:g}, expected a number {span}")
        return rounded

    return read


def integer(low: int, high: int | None = None) -> Callable[[str, Any], int]:
    """Reader of an integer from ``low`` to ``high``; None: no upper bound."""
    span = f"at least {low}" if high is None else f"from {low} to {high}"

    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidValue(f"{name} is {value!r}, expected an integer {span}")
        if value < low or (high is not None and value > high):
            raise InvalidValue(f"{name} is {value}, expected an integer {span}")
        return value

    return read


_TOP_K = integer(-1)
_HALF = 2**63
_SEED = integer(-_HALF, _HALF - 1)
_ALTERNATIVES = integer(0, 20)


def top_k(name: str, value: Any) -> int:
    """Reads top-k. Clients commonly send -1 for "all tokens", which is 0 in the LLM API."""
    return max(0, _TOP_K(name, value))


def seed(name: str, value: Any) -> int:
    """Maps OpenAI's signed seeds one to one to the engines' unsigned ones."""
    return _SEED(name, value) % (2 * _HALF)


def logprobs(name: str, value: Any) -> int:
    """Reads the number of logprobs, and returns at least 1.

    OpenAI's 0 requests the chosen token's logprob only; TensorRT-LLM returns no logprobs for 0.
    """
    return max(1, _ALTERNATIVES(name, value))


prompt_logprobs = _ALTERNATIVES
