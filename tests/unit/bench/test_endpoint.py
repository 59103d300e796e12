"""The endpoint inside aiperf's own record parser, over every hostile answer that has a body to read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from importlib.metadata import entry_points
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
from aiperf.common.messages import MetricRecordsData, RecordsMessage
from aiperf.common.models import ErrorDetails, MetricRecordMetadata, ParsedResponseRecord, RequestRecord, TextResponse
from aiperf.plugin import plugins
from aiperf.post_processors.record_observer_context import RecordObserverContext
from aiperf.transports.sse_utils import AsyncSSEStreamReader
from hostile_server import ANSWERS, OSL, SSE, Hostile, chunk, stream, usage, words

from trtx.bench.endpoint import API_KEY_VARIABLE, ENDPOINT_TYPE, ENTRY_POINT, ENTRY_POINT_GROUP
from trtx.bench.failures import reason
from trtx.bench.records import ANSWER_FORMAT, NAMED_MODELS

EXACT = {"ignore_eos": True, "min_tokens": OSL}


def endpoint(extra: dict[str, Any] | None = None, *, streaming: bool = True) -> Any:
    kind = plugins.get_class("endpoint", ENDPOINT_TYPE)
    asked = list((EXACT if extra is None else extra).items())
    return kind(model_endpoint=SimpleNamespace(endpoint=SimpleNamespace(streaming=streaming, extra=asked)))


async def record_of(answer: Hostile, sent: dict[str, Any] | None = None) -> RequestRecord:
    """What aiperf's client makes of a body that arrived. ``sent``: the body of the request; None: it was not kept."""

    async def body() -> AsyncIterator[bytes]:
        yield answer.body

    read = [TextResponse(perf_ns=1, text=answer.body.decode(), content_type=answer.kind)]
    responses = [event async for event in AsyncSSEStreamReader(body())] if answer.kind == SSE else read
    record: RequestRecord = RequestRecord.model_construct(
        responses=responses,
        error=None,
        request_info=SimpleNamespace(max_tokens=OSL, payload_bytes=sent and json.dumps(sent).encode()),
    )
    record._parsed_responses_cache = None
    return record


READ = [name for name, answer in ANSWERS.items() if answer.status == 200 and not answer.is_cut]


@pytest.mark.parametrize(
    "name", [name for name in READ if name != "error as an event"]
)  # aiperf's client sees that one
async def test_only_a_whole_answer_leaves_the_record_without_an_error(name: str) -> None:
    record = await record_of(ANSWERS[name])
    endpoint().extract_response_data(record)
    found = None if record.error is None else reason(record.error.model_dump())
    assert found == ANSWERS[name].reason


@pytest.mark.parametrize("key", ["sk-1", None])
def test_requests_carry_the_key_that_bench_handed_on_and_no_other(
    monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-server")
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    if key is not None:
        monkeypatch.setenv(API_KEY_VARIABLE, key)
    asks = endpoint()
    asks.model_endpoint.endpoint.headers, asks.model_endpoint.endpoint.api_key = [("X-Team", "perf")], None
    expected = {"X-Team": "perf"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    assert asks.get_endpoint_headers(SimpleNamespace(x_request_id=None)) == expected


def test_a_request_has_its_id_where_dynamo_takes_it_from() -> None:
    asks = endpoint()
    asks.model_endpoint.endpoint.headers, asks.model_endpoint.endpoint.api_key = None, None
    sent = asks.get_endpoint_headers(SimpleNamespace(x_request_id="6f1e"))

    assert sent["x-dynamo-request-id"] == "6f1e"


@pytest.mark.parametrize(
    ("named", "kept"),
    [
        (["", "a/b", "a/b", None], ["a/b"]),  # a filter's chunk first has an empty one
        (["a", "b", "a"], ["a", "b"]),
        ([None, 7, ["a"]], []),
        ([f"m{i}" for i in range(50)], ["m0", "m1", "m2", "m3"]),
        (["x\n\x1b[2J" + "y" * 10_000], ["x [2J" + "y" * 194 + "…"]),
    ],
)
async def test_the_models_that_an_answer_names_are_kept_in_its_record(named: list[Any], kept: list[str]) -> None:
    """By aiperf's own way from its parser to what it writes: observers see a record last."""
    events = [*words(OSL), chunk({}, "length"), usage(OSL)]
    events += [{**chunk({}), "choices": [], "model": model} for model in named]
    record = await record_of(Hostile(stream(events), None))
    endpoint().extract_response_data(record)
    assert record.error is None
    assert (await written_of(record)).get(NAMED_MODELS, []) == kept


async def written_of(record: RequestRecord) -> dict[str, Any]:
    """The metadata that aiperf writes of a record, after all observers of trtx have seen it."""
    metadata = MetricRecordMetadata(
        session_num=0, request_start_ns=1, request_end_ns=2, worker_id="w", record_processor_id="p",
        benchmark_phase="profiling",
    )  # fmt: skip
    parsed = ParsedResponseRecord(request=record, responses=[])
    for entry in plugins.iter_entries("record_observer"):
        if entry.name.startswith("trtx"):
            observer = plugins.get_class("record_observer", entry.name)(run=None, service_id="p")
            await observer.observe(RecordObserverContext(record=parsed, metadata=metadata, produced={}))
    message = RecordsMessage(
        service_id="p", metadata=metadata, records=[MetricRecordsData(metadata=metadata, metrics={})]
    )
    found: dict[str, Any] = (
        RecordsMessage.from_json(message.to_json_bytes()).records[0].metadata.model_dump(exclude_none=True)
    )
    return found


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ASKS = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}


@pytest.mark.parametrize(
    ("text", "finish", "outcome", "error"),
    [
        ('{"a": 1}', "stop", "kept", None),
        ('{"a": "1"}', "stop", "broken", "the answer breaks its JSON schema at $.a: type integer"),
        ("No.", "stop", "broken", "the answer is not JSON (Expecting value), although its request asks for JSON"),
        ('{"a"', "length", "cut", None),
    ],
)
async def test_an_answer_that_breaks_its_schema_is_a_failed_request_and_one_that_is_cut_is_not(
    text: str, finish: str, outcome: str, error: str | None
) -> None:
    parts = [chunk({"content": text[at : at + 3]}) for at in range(0, len(text), 3)]
    events = [*parts, chunk({}, finish), usage(OSL)]
    record = await record_of(Hostile(stream(events), None), sent=ASKS)
    endpoint(extra={}).extract_response_data(record)
    assert (None if record.error is None else reason(record.error.model_dump())) == error
    assert (await written_of(record))[ANSWER_FORMAT] == {"asked": ["format"], "outcome": outcome, "reason": error or ""}


async def test_what_a_failed_request_asked_for_is_kept_too_and_nothing_is_claimed_without_its_body() -> None:
    for sent, kept in ((ASKS, {"asked": ["format"]}), ({"messages": []}, {"asked": []}), (None, None)):
        record = await record_of(Hostile(stream([]), None), sent=sent)
        record.error = ErrorDetails(type="ClientResponseError", message="no", code=400)
        assert (await written_of(record)).get(ANSWER_FORMAT) == kept


async def test_text_and_usage_are_those_that_aiperfs_own_endpoint_reads() -> None:
    record = await record_of(ANSWERS["whole"])
    own = plugins.get_class("endpoint", "chat")(model_endpoint=endpoint().model_endpoint)
    theirs = own.extract_response_data(record)
    record._parsed_responses_cache = None
    assert endpoint().extract_response_data(record) == theirs != []


async def test_an_error_of_the_transport_is_kept() -> None:
    record = await record_of(ANSWERS["no finish reason"])
    record.error = ErrorDetails(type="ClientPayloadError", message="cut")
    endpoint().extract_response_data(record)
    assert record.error.type == "ClientPayloadError"


async def test_an_answer_without_a_limit_may_have_any_length_and_still_has_to_end() -> None:
    for answer, is_whole in (("whole", True), ("no finish reason", False)):
        record = await record_of(ANSWERS[answer])
        record.request_info.max_tokens = None  # as aiperf has it where a record of a dataset has no output length
        endpoint().extract_response_data(record)
        assert (record.error is None) == is_whole, answer


async def test_an_answer_may_stop_by_itself_where_that_was_asked() -> None:
    record = await record_of(ANSWERS["half of the tokens"])
    endpoint(extra={}).extract_response_data(record)
    assert record.error is None


async def test_a_broken_stream_is_a_failure_although_its_text_is_read() -> None:
    record = await record_of(Hostile(stream(words(3)), None))
    assert endpoint().extract_response_data(record)
    assert record.error is not None


def test_aiperf_finds_the_endpoint_through_the_installed_package_alone() -> None:
    (found,) = entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT)
    package, _, manifest = found.value.partition(":")
    assert f"\n  {ENDPOINT_TYPE}:\n" in (files(package) / manifest).read_text(encoding="utf-8")
    assert plugins.get_endpoint_metadata(ENDPOINT_TYPE) == plugins.get_endpoint_metadata("chat")


@pytest.mark.parametrize("extra", [{"stream": False}, {"max_tokens": 1}, {"max_completion_tokens": 1}])
async def test_what_was_asked_is_aiperfs_own_streaming_and_length_whatever_the_extra_fields_say(
    extra: dict[str, Any],
) -> None:
    record = await record_of(ANSWERS["one body"])
    endpoint(extra=EXACT | extra).extract_response_data(record)
    assert record.error is not None and record.error.message == ANSWERS["one body"].reason
    record = await record_of(ANSWERS["whole"])
    endpoint(extra=EXACT | extra).extract_response_data(record)
    assert record.error is None


@pytest.mark.parametrize("name", READ)
async def test_nothing_that_a_server_says_raises_in_aiperfs_worker_or_is_a_count_that_is_none(name: str) -> None:
    """The worker reads an answer through another method of the endpoint, and computes with its usage."""
    parsed, _ = endpoint().process_responses(await record_of(ANSWERS[name]), capture_assistant_turn=False)
    for counts in [read.usage for read in parsed if read.usage]:
        assert type(counts.completion_tokens) is int and type(counts.prompt_tokens) in (int, type(None))


async def test_what_aiperf_can_not_read_is_left_out_of_what_it_gets() -> None:
    strange = [None, [], {"object": "chat.completion.chunk", "choices": [3]}, {"usage": [1]}, {"choices": 3}]
    assert [endpoint()._parse_json_response(1, document) for document in strange] == [None] * 5
