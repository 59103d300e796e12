"""What ``make proof`` tries in full and the shorter runs in part: examples of property tests, and values of grids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hypothesis
import pytest

_ALL = 100  # examples of the profile "full" in tests/conftest.py


def examples(count: int) -> int:
    """Returns the share of ``count`` that the loaded Hypothesis profile draws, and at least 5 of them."""
    share = hypothesis.settings.default.max_examples / _ALL
    return min(count, max(5, round(count * share)))


def first_of(count: int, values: Iterable[Any]) -> list[Any]:
    """Returns ``values`` for ``parametrize``, where all after the first ``count`` are left to ``make proof``."""
    proof = pytest.mark.proof
    return [
        value if number < count else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=proof)
        for number, value in enumerate(values)
    ]
