"""Spans of ended requests: only of sampled traces, only of measured stages, and never in a request's way."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from loopback import Handler, serving

from trtx.worker.requests import span_export
from trtx.worker.requests.span_export import MOST_WAITING, SpanExport
from trtx.worker.requests.spans import spans_of
from trtx.worker.requests.stage_clock import EndedRequest

SAMPLED = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


def ended(**values: Any) -> EndedRequest:
    return EndedRequest(id="a", worker="agg-0", role="agg", outcome="length", arrived_ns=10**18, ended_s=1.0, **values)


def test_the_stages_follow_each_other_below_the_worker() -> None:
    row = ended(submitted_s=0.25, media_s=0.125, queue_s=0.0625, prefill_s=0.125, decode_s=0.25, first_chunk_s=0.5)

    whole, *stages = spans_of(row, SAMPLED)

    assert (whole["traceId"], whole["parentSpanId"], whole["name"]) == ("a" * 32, "b" * 16, "trtx.agg")
    assert [stage["name"] for stage in stages] == ["media", "queue", "prefill", "decode"]
    assert {stage["parentSpanId"] for stage in stages} == {whole["spanId"]}
    for before, after in pairwise(stages):
        assert before["endTimeUnixNano"] == after["startTimeUnixNano"]
    assert [event["name"] for event in whole["events"]] == ["first chunk"]


@pytest.mark.parametrize(
    "headers", [None, {}, {"traceparent": "nonsense"}, {"traceparent": f"00-{'a' * 32}-{'b' * 16}-00"}]
)
def test_what_is_not_sampled_has_no_span(headers: dict[str, str] | None) -> None:
    assert spans_of(ended(), headers) == []


def test_an_unmeasured_stage_has_no_span() -> None:
    assert [span["name"] for span in spans_of(ended(submitted_s=0.1), SAMPLED)] == ["trtx.agg"]


@pytest.fixture
def collected() -> Iterator[tuple[str, list[Any]]]:
    bodies: list[Any] = []

    class Traces(Handler):
        def do_POST(self) -> None:
            bodies.append(self.asked())
            self.answer(200)

    with serving(Traces) as url:
        yield f"{url}/v1/traces", bodies


def test_a_worker_that_stops_sends_what_waits(collected: tuple[str, list[Any]]) -> None:
    url, bodies = collected
    export = SpanExport(url, "trtx-agg-0")
    export.put(ended(), SAMPLED)
    export.put(ended(), None)
    export.close()

    (resource,) = [one for body in bodies for one in body["resourceSpans"]]
    assert resource["resource"]["attributes"][0]["value"] == {"stringValue": "trtx-agg-0"}
    assert len(resource["scopeSpans"][0]["spans"]) == 1


def test_a_collector_that_is_gone_costs_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(span_export, "_AGAIN_SECONDS", 0.001)
    monkeypatch.setattr(span_export, "_EVERY_SECONDS", 0.001)
    export = SpanExport("http://127.0.0.1:1/v1/traces", "trtx-agg-0")
    for _ in range(MOST_WAITING + 500):
        export.put(ended(), SAMPLED)
    export.close()

    assert len([one for one in caplog.records if "takes no spans" in one.message]) == 1
