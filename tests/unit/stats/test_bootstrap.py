from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from examples import first_of
from hypothesis import given
from hypothesis import strategies as st

from trtx.stats.bootstrap import block_length, bootstrap_interval
from trtx.stats.percentiles import percentile

Statistic = Callable[[Sequence[float]], float]


def _mean(samples: Sequence[float]) -> float:
    return float(np.mean(np.asarray(samples)))


def _median(samples: Sequence[float]) -> float:
    return float(np.median(np.asarray(samples)))


def _alike(seed: int, count: int, correlation: float) -> list[float]:
    """An autoregressive series of mean 0: each sample is ``correlation`` of the one before, and chance."""
    random = np.random.default_rng(seed)
    series = [random.standard_normal() / math.sqrt(1 - correlation**2)]
    for chance in random.standard_normal(count - 1):
        series.append(correlation * series[-1] + chance)
    return series


@pytest.mark.slow
@pytest.mark.parametrize(("correlation", "statistic"), first_of(1, [(0.7, _mean), (0.0, _median)]))
def test_it_covers_the_truth_nearly_as_often_as_it_says(correlation: float, statistic: Statistic) -> None:
    """Intervals that took neighbours for independent would cover the mean of the second series 6 times of 10."""
    series = [_alike(seed, 600, correlation) for seed in range(80)]
    found = [bootstrap_interval(one, statistic, seed=1, resamples=100) for one in series]
    covered = sum(interval is not None and 0 in interval for interval in found)
    assert 0.78 <= covered / len(series) <= 0.99


@pytest.mark.parametrize("correlation", [0.5, 0.8])
def test_blocks_are_as_long_as_the_sources_say_of_a_known_series(correlation: float) -> None:
    """Of an autoregressive series the best length is known: (2ρ/(1 − ρ²))^⅔ n^⅓ (Politis and White 2004)."""
    count = 2000
    known = (2 * correlation / (1 - correlation**2)) ** (2 / 3) * count ** (1 / 3)
    found = np.median([block_length(_alike(seed, count, correlation)) for seed in range(15)])
    assert found == pytest.approx(known, rel=0.25)


def test_blocks_of_independent_samples_are_short() -> None:
    assert np.median([block_length(_alike(seed, 1000, 0)) for seed in range(15)]) < 4


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=60))
def test_blocks_are_within_their_bounds(samples: list[float]) -> None:
    assert 1 <= block_length(samples) <= max(1, 3 * math.sqrt(len(samples)), len(samples) / 3)


@pytest.mark.parametrize("samples", [[5.0], [5.0] * 40, [0.0, 2.0, 1.0]])
def test_blocks_of_what_does_not_vary_or_has_no_spectrum_are_single_samples(samples: list[float]) -> None:
    with np.errstate(all="raise"):
        assert block_length(samples) == 1


def test_any_statistic_has_its_interval_and_equal_seeds_give_equal_ones() -> None:
    samples = [200 + sample for sample in _alike(3, 800, 0.3)]
    found = [
        bootstrap_interval(samples, lambda drawn: percentile(drawn, 90), seed=seed, resamples=100) for seed in (1, 1, 2)
    ]
    assert found[0] and found[0] == found[1] != found[2]
    assert found[0].low < found[0].estimate == percentile(samples, 90) < found[0].high
    assert math.isclose(found[0].low, 200, rel_tol=0.02)


def test_more_confidence_is_wider() -> None:
    samples = _alike(4, 300, 0.5)
    narrow, wide = (bootstrap_interval(samples, _mean, seed=1, confidence=level) for level in (0.8, 0.99))
    assert narrow and wide and wide.low < narrow.low < narrow.high < wide.high


def test_too_few_requests_or_too_much_in_common_have_no_interval() -> None:
    enough = _alike(1, 30, 0)
    assert bootstrap_interval(enough, _mean, seed=1) is not None
    assert bootstrap_interval(enough[:29], _mean, seed=1) is None
    assert bootstrap_interval([float(number) for number in range(200)], _mean, seed=1) is None  # it grows all the time
