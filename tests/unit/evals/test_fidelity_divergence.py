"""The divergence that likeliest tokens show, against the exact one of whole distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trtx.evals.fidelity.divergence import PositionComparison, compare

VOCABULARY = 60


def distribution(seed: int, sharpness: float, like: np.ndarray | None = None) -> np.ndarray:
    """Probabilities. ``like``: logits to begin from, which ``sharpness`` then moves away from."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, sharpness, VOCABULARY) + (0 if like is None else like)
    found = np.exp(logits - logits.max())
    return found / found.sum()


def shown(whole: np.ndarray, top: int, own: int) -> dict[int, float]:
    """As an engine shows a position: its own token, and the likeliest."""
    kept = [own, *np.argsort(-whole, kind="stable")[:top]]
    return {int(token): float(np.log(whole[token])) for token in kept}


def exact(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.sum(p * np.log(p / q)))


PAIRS = st.tuples(
    st.integers(0, 2**32 - 1),
    st.floats(0.1, 5),  # how sharp the reference is
    st.floats(0.01, 5),  # how far the other is from it
    st.booleans(),  # whether the other has anything to do with it
    st.integers(1, 25),
    st.integers(0, VOCABULARY - 1),
)


@settings(deadline=None, max_examples=examples(400))
@given(PAIRS)
def test_what_is_shown_is_never_more_than_the_whole(drawn: tuple[int, float, float, bool, int, int]) -> None:
    seed, sharpness, distance, is_related, top, own = drawn
    p = distribution(seed, sharpness)
    q = distribution(seed + 1, distance, np.log(p) if is_related else None)
    found = compare(shown(p, top, own), shown(q, top, own), top)
    assert 0 <= found.kl <= exact(p, q) + 1e-5
    assert found.agrees == (p.argmax() == q.argmax())
    both = shown(p, top, own).keys() & shown(q, top, own).keys()
    assert found.shared == pytest.approx(sum(p[token] for token in both), abs=1e-9)


@settings(deadline=None, max_examples=examples(100))
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 3), st.floats(0.1, 3))
def test_it_is_exact_where_all_is_shown(seed: int, sharpness: float, distance: float) -> None:
    p, q = distribution(seed, sharpness), distribution(seed + 1, distance)
    found = compare(shown(p, VOCABULARY, 0), shown(q, VOCABULARY, 0), VOCABULARY)
    assert found.kl == pytest.approx(exact(p, q), abs=2e-5)
    assert found.shared == pytest.approx(1)


@settings(deadline=None, max_examples=examples(100))
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 5), st.integers(1, 30))
def test_a_distribution_does_not_diverge_from_itself(seed: int, sharpness: float, top: int) -> None:
    p = distribution(seed, sharpness)
    found = compare(shown(p, top, 3), shown(p, top, 3), top)
    assert found.kl == pytest.approx(0, abs=1e-12) and found.agrees


def test_it_is_near_the_whole_where_little_lies_in_the_tail() -> None:
    """As of a trained model: the 20 likeliest hold almost all, and noise of a quantization is seen."""
    kept, whole = [], []
    for seed in range(200):
        p = distribution(seed, 4)
        q = distribution(10_000 + seed, 0.1, np.log(p))
        kept.append(compare(shown(p, 20, 0), shown(q, 20, 0), 20).kl)
        whole.append(exact(p, q))
    assert 0.95 < sum(kept) / sum(whole) <= 1


def test_a_likely_token_that_the_served_engine_does_not_show_counts_by_the_least_that_it_shows() -> None:
    """Lumped with the tail alone, as 0.9 among 0.9, this would be no divergence of that token at all."""
    reference = {1: math.log(0.9), 2: math.log(0.05)}
    served = {2: math.log(0.05), 3: math.log(0.9), 4: math.log(0.01)}
    found = compare(reference, served, 3)
    assert found == PositionComparison(pytest.approx(0.9 * math.log(0.9 / 0.01), abs=0.2), False, pytest.approx(0.05))  # type: ignore[arg-type]
    assert found.kl <= 0.9 * math.log(0.9 / 0.01) + 0.05 * math.log(0.05 / 1e-6)


def test_fewer_tokens_than_were_asked_for_bound_nothing_by_their_least() -> None:
    """Nobody knows then that what is not shown is less likely."""
    reference, served = {1: math.log(0.9), 2: math.log(0.05)}, {2: math.log(0.05)}
    assert compare(reference, served, 1).kl > compare(reference, served, 20).kl


def test_of_equally_likely_tokens_one_that_both_have_is_agreement() -> None:
    half = math.log(0.5)
    assert compare({1: half, 2: half}, {2: half, 3: half}, 2).agrees
    assert not compare({1: half, 2: half}, {3: half, 4: half, 1: math.log(0.1)}, 2).agrees
