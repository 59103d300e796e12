"""How long a stream rests: not at all where nothing else can be in the way, longer the slower its last chunk went."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trtx.worker.requests.pacing import FEW_STREAMS, LONGEST_SECONDS, UNHURRIED_SECONDS, rest_seconds

SECONDS = st.floats(0.0, 100.0)
STREAMS = st.integers(1, 10_000)


@given(SECONDS, STREAMS)
def test_a_rest_is_bounded_and_only_for_what_was_slow_among_many(passed_s: float, streams: int) -> None:
    rest = rest_seconds(passed_s, streams)
    assert 0.0 <= rest <= LONGEST_SECONDS
    assert (rest > 0.0) == (streams > FEW_STREAMS and passed_s > UNHURRIED_SECONDS)


@given(SECONDS, SECONDS, STREAMS)
def test_slower_is_never_a_shorter_rest(first: float, second: float, streams: int) -> None:
    low, high = sorted((first, second))
    assert rest_seconds(low, streams) <= rest_seconds(high, streams)


def test_a_busy_bridge_is_left_to_others_for_most_of_the_time() -> None:
    """Of 5 ms: what is passed on and rests in turn is at it for less than a seventh."""
    assert rest_seconds(0.005, 256) > 6 * 0.005
