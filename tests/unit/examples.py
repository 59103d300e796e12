"""How many examples a property test draws: all of them in ``make proof``, a share of them in the shorter runs."""

from __future__ import annotations

import hypothesis

_ALL = 100  # examples of the profile "full" in tests/conftest.py


def examples(count: int) -> int:
    """Returns the share of ``count`` that the loaded Hypothesis profile draws, and at least 10 of them."""
    share = hypothesis.settings.default.max_examples / _ALL
    return min(count, max(10, round(count * share)))
