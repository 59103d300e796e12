"""Ids that two engines share are nobody else's."""

from __future__ import annotations

import pytest

from trtx.engine import request_ids
from trtx.engine.request_ids import RequestIds


def test_request_ids_are_distinct_and_beyond_an_engines_own() -> None:
    ids = RequestIds(worker_id=2**64 - 1)
    made = [ids.next() for _ in range(500)]
    assert len(set(made)) == 500
    assert all(2**40 < one < 2**63 for one in made)


def test_the_milliseconds_start_again_in_2039_and_then_alone_are_ids_small(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = 4 * (1 << 39) / 1000  # seconds since the epoch: 7 September 2039
    for after, is_small in ((-1, False), (0, True), (65, True), (66, False)):
        monkeypatch.setattr(request_ids.time, "time", lambda after=after: turn + after)
        assert (RequestIds(3).next() < 2**40) is is_small
