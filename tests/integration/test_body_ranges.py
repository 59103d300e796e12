"""The ranges that a load's body is held against, asked of the real frontend: it takes their ends and nothing beyond."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from processes import HTTP, Topology, topology

from trtx.bench.body_ranges import RANGES
from trtx.checkpoint import resolve_checkpoint


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    with topology(tmp_path_factory.mktemp("served"), resolve_checkpoint("synthetic:tiny").path) as running:
        running.start_frontend()
        running.start_worker("agg-0", max_seq_len=256, paced_itl_ms=1)
        running.wait_ready(aggregated=1)
        yield running


@pytest.mark.parametrize("name", RANGES)
def test_the_frontend_takes_what_is_within_and_refuses_what_is_beyond(served: Topology, name: str) -> None:
    asked = RANGES[name]
    step = 1 if asked.is_whole else 1e-3
    low, high = (int(asked.low), int(asked.high)) if asked.is_whole else (asked.low, asked.high)
    lowest = low + 0.01 if asked.is_open else low
    for value in (lowest, high):
        assert asked.holds(value) and _status(served, name, value) == 200, value
    for value in (low if asked.is_open else low - step, high + step, True, "x", *([1.5] if asked.is_whole else [])):
        assert not asked.holds(value) and _status(served, name, value) == 400, value
    assert _status(served, name, None) == 200


def _status(served: Topology, name: str, value: object) -> int:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, name: value}
    answer = HTTP.post(f"{served.url}/v1/chat/completions", json={"model": served.model_name, **body}, timeout=60)
    return answer.status_code
