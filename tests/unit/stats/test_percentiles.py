from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.stats.percentiles import percentile, samples_needed


@pytest.mark.parametrize(("q", "n"), [(50, 11), (90, 64), (95, 130), (99, 662)])
def test_the_numbers_of_samples_are_the_documented_ones(q: int, n: int) -> None:
    assert samples_needed(q) == n


@given(st.lists(st.integers(-1000, 1000), min_size=2, max_size=40))
def test_percentiles_agree_with_the_standard_library(samples: list[int]) -> None:
    expected = statistics.quantiles(samples, n=100, method="inclusive")
    for q in (1, 25, 50, 90, 99):
        assert percentile(samples, q) == pytest.approx(expected[q - 1])


def test_one_sample_is_every_percentile() -> None:
    assert percentile([123.0], 99) == 123.0
