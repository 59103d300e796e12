"""The pictures of a request: in order, counted against their places, which become as long as their embeddings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.engine import load
from trtx.torch_engine.llmapi import DisaggregatedParams
from trtx.worker import handoff, roles
from trtx.worker.pictures import Picture, check_placeholders, expand, picture_urls
from trtx.worker.request import InvalidRequest, WorkerRequest, parse, with_media

IMAGE = 9


def url(text: str) -> dict[str, str]:
    return {"Url": text}


def test_addresses_come_in_their_order_and_none_where_there_are_none() -> None:
    media = {"image_url": [url("b"), url("a"), url("b")]}
    assert picture_urls({"multi_modal_data": media}) == ("b", "a", "b")
    assert picture_urls({}) == picture_urls({"multi_modal_data": None}) == picture_urls({"multi_modal_data": {}}) == ()


@pytest.mark.parametrize(
    ("media", "says"),
    [
        ({"video_url": [url("v")], "image_url": [url("a")]}, "brings video_url, expected images alone"),
        ({"audio_url": [url("v")]}, "brings audio_url, expected images alone"),
        ({"image_url": [{"UuidOnly": "name"}]}, "a uuid alone, expected its url too"),
        ({"image_url": [{"Decoded": {"shape": [1]}}]}, "a form that this worker does not read"),
        ({"image_url": ["a"]}, "a form that this worker does not read"),
    ],
)
def test_what_is_no_picture_with_an_address_is_refused(media: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        picture_urls({"multi_modal_data": media})


@pytest.mark.parametrize(
    ("token_ids", "count", "says"),
    [
        ([1, IMAGE, IMAGE], 1, "2 image placeholders and the request 1 images.*leave the placeholder's text out"),
        ([1, 2], 1, "0 image placeholders and the request 1 images.*see the model's chat template"),
        ([IMAGE], 0, "1 image placeholders and the request 0 images"),
    ],
)
def test_pictures_without_a_place_and_places_without_a_picture_are_refused(
    token_ids: list[int], count: int, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        check_placeholders(token_ids, IMAGE, count)


@given(
    between=st.lists(st.lists(st.integers(0, 8), max_size=4), min_size=1, max_size=5),
    rows=st.lists(st.integers(1, 6), min_size=4, max_size=4),
)
def test_a_place_becomes_as_long_as_its_picture_and_all_else_stays(between: list[list[int]], rows: list[int]) -> None:
    pictures = [Picture(bytes([index]) * 32, rows[index], (1, 1, rows[index])) for index in range(len(between) - 1)]
    prompt = [token for index, words in enumerate(between) for token in ([IMAGE] if index else []) + words]
    check_placeholders(prompt, IMAGE, len(pictures))
    expanded, spans = expand(prompt, IMAGE, pictures)
    assert [token for token in expanded if token != IMAGE] == [token for words in between for token in words]
    assert [(span.key, span.length, span.grid) for span in spans] == [(one.key, one.rows, one.grid) for one in pictures]
    covered = {position for span in spans for position in range(span.start, span.start + span.length)}
    assert covered == {position for position, token in enumerate(expanded) if token == IMAGE}


def seen(wire: dict[str, Any], rows: int = 4, context_length: int = 20) -> WorkerRequest:
    request = parse(wire, context_length=context_length, sees=True)
    token_ids, spans = expand(wire["token_ids"], IMAGE, [Picture(b"k" * 32, rows, (1, 2, 2))])
    return with_media(
        request, token_ids, spans, context_length=context_length, routing=wire.get("mm_routing_info")
    )  # fmt: skip


WIRE: dict[str, Any] = {
    "token_ids": [5, IMAGE, 6],
    "multi_modal_data": {"image_url": [url("a")]},
    "multi_modal_uuids": {"image_url": ["name"]},
    "extra_args": {"mm_hashes": ["1"]},
}


def test_the_context_counts_every_row_of_a_picture() -> None:
    request = seen(WIRE | {"stop_conditions": {"max_tokens": 99, "min_tokens": 99}}, rows=10)
    assert (len(request.token_ids), request.received_tokens) == (12, 3)
    assert (request.sampling["max_tokens"], request.sampling["min_tokens"]) == (8, 8)
    with pytest.raises(InvalidRequest, match="the prompt has 20 tokens and the context holds 20"):
        seen(WIRE, rows=18)


def test_the_ids_that_a_router_knows_are_used_where_they_fit_the_prompt() -> None:
    ids = [5, 101, 101, 101, 101, 6]
    fits = {"routing_token_ids": [*ids, 0, 0], "block_mm_infos": [], "expanded_prompt_len": 6}
    assert seen(WIRE | {"mm_routing_info": fits}).routing_token_ids == tuple(ids)
    assert seen(WIRE | {"mm_routing_info": fits | {"expanded_prompt_len": 7}}).routing_token_ids is None
    assert seen(WIRE | {"mm_routing_info": fits | {"routing_token_ids": ids[:5]}}).routing_token_ids is None
    assert seen(WIRE).routing_token_ids is None


def test_images_are_refused_where_the_worker_takes_none_and_processor_options_everywhere() -> None:
    with pytest.raises(
        InvalidRequest, match=r"brings media \(image_url\), expected text alone: this model, or the eng"
    ):
        parse(WIRE, context_length=20)
    for sees in (False, True):
        with pytest.raises(InvalidRequest, match=r"mm_processor_kwargs is given \(max_pixels\), expected none"):
            parse({"token_ids": [5], "mm_processor_kwargs": {"max_pixels": 9}}, context_length=20, sees=sees)


def test_decode_gets_the_places_of_pictures_and_no_picture() -> None:
    """By prefill's answer through JSON; the prompt that it was made for is known by what the frontend sent."""
    request = seen(WIRE)
    chunk: dict[str, Any] = {"finish_reason": "length"}
    params = DisaggregatedParams(first_gen_tokens=[1], opaque_state=b"kv")

    class Result:
        outputs = (type("Output", (), {"disaggregated_params": params}),)

    handoff.add_to(chunk, Result, request, "prefill-0")
    answer = json.loads(json.dumps(chunk["disaggregated_params"]))
    pictures = handoff.pictures_of(answer)
    assert pictures == (Picture(b"k" * 32, 4, (1, 2, 2)),)
    assert expand(WIRE["token_ids"], IMAGE, pictures) == (request.token_ids, list(request.media))
    wire = WIRE | {"prefill_result": {"disaggregated_params": answer}}
    assert roles.handed_over("decode", request, wire) == answer
    assert roles.handed_over("agg", request, wire) is None
    longer = parse(wire | {"token_ids": [5, IMAGE, 6, 7]}, context_length=20, sees=True)  # it moved, with a token more
    assert roles.handed_over("decode", longer, wire) is None


@pytest.mark.parametrize("media", [[{}], [{"key": "no hex", "rows": 1, "grid": None}], [7]])
def test_places_that_can_not_be_read_are_refused(media: Any) -> None:
    with pytest.raises(InvalidRequest, match="media in prefill's disaggregated_params can't be read"):
        handoff.pictures_of({"media": media})


def test_a_prompt_that_has_to_be_computed_after_all_goes_on_behind_what_was_generated() -> None:
    api = load("torch")
    submission = roles.plan("agg", seen(WIRE), WIRE, api, lambda: None)
    assert roles.again(submission, None, api) == submission

    class Output:
        token_ids = (3, 4)
        logprobs = ()

    again = roles.again(submission, Output, api)
    assert again.request == submission.request
    assert (again.disaggregated_params.request_type, again.disaggregated_params.first_gen_tokens) == (
        "generation_only",
        [3, 4],
    )
    assert again.disaggregated_params.opaque_state is None
