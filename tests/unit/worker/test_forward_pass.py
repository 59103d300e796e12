"""Forward-pass metrics for a planner: one record a step, or none at all."""

from __future__ import annotations

from typing import Any

import pytest

from trtx.worker import forward_pass
from trtx.worker.forward_pass import ForwardPassPublication, wants_forward_passes

BATCH = {
    "numContextRequests": 1, "numCtxTokens": 20, "numCtxKvTokens": 4, "numGenRequests": 2, "numGenKvTokens": 90,
    "numQueuedContextRequests": 3, "numQueuedCtxTokens": 60, "numQueuedGenRequests": 4, "numQueuedGenKvTokens": 80,
    "numPausedRequests": 5, "numPausedKvTokens": 50,
}  # fmt: skip
ROW: dict[str, Any] = {"iter": 1, "iterLatencyMS": 12.5, "inflightBatchingStats": BATCH}


class Publisher:
    """Takes the records instead of the event plane."""

    def __init__(self, endpoint: object, worker_id: str, dp_size: int) -> None:
        self.published: list[dict[str, Any]] = []
        self.is_shut = False

    def publish(self, **record: Any) -> None:
        self.published.append(record)

    def shutdown(self) -> None:
        self.is_shut = True


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Publisher:
    made = Publisher(None, "7", 2)
    monkeypatch.setattr(forward_pass, "FpmDirectPublisher", lambda *arguments: made)
    return made


def test_each_step_of_each_rank_is_published_once(publisher: Publisher) -> None:
    publication = ForwardPassPublication(None, 7, 2)
    for row in (ROW, ROW, {**ROW, "attentionDpRank": 1}, {**ROW, "iter": 2}):
        publication.publish(row)
    assert [one["dp_rank"] for one in publisher.published] == [0, 1, 0]
    first = publisher.published[0]
    assert first["wall_time_secs"] == 0.0125 and first["scheduled_sum_prefill_tokens"] == 20
    assert first["queued_num_decode_requests"] == 9 and first["queued_sum_decode_kv_tokens"] == 130


def test_an_engine_that_reports_less_gets_one_warning_and_no_records(
    publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    publication = ForwardPassPublication(None, 7, 1)
    old = {name: value for name, value in BATCH.items() if name not in ("numPausedKvTokens", "numGenKvTokens")}
    for number in range(3):
        publication.publish({**ROW, "iter": number, "inflightBatchingStats": old})
    assert publisher.published == [] and publisher.is_shut
    (warning,) = caplog.messages
    assert "lack queued_sum_decode_kv_tokens, scheduled_sum_decode_kv_tokens" in warning


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"DYN_FORWARDPASS_METRIC_PORT": "20380"}, True),
        ({"DYN_FPM_TRACE": "on"}, True),
        ({"DYN_FPM_TRACE": "0"}, False),
    ],
)
def test_dynamos_variables_turn_it_on(environment: dict[str, str], wanted: bool) -> None:
    assert wants_forward_passes(environment) == wanted
