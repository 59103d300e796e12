"""The pictures of a request: in order, counted against their places, which become as long as their embeddings."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtx.checkpoint.vision import VisionConfig
from trtx.engine import load
from trtx.engine.api import Clip, MediaSpan
from trtx.torch_engine.llmapi import DisaggregatedParams
from trtx.worker.multimodal.images import Picture, Sent, check_placeholders, expand, sent_media
from trtx.worker.requests import handoff, roles
from trtx.worker.requests.invalid_request import InvalidRequest
from trtx.worker.requests.request import WorkerRequest, parse, with_media

IMAGE, VIDEO = 9, 8
LLAVA = VisionConfig("LlavaForConditionalGeneration", hidden_size=4, image_token_id=IMAGE, tokens_per_image=2)
QWEN = VisionConfig(
    "Qwen2_5_VLForConditionalGeneration",
    hidden_size=4,
    image_token_id=IMAGE,
    tokens_per_image=None,
    spatial_merge=2,
    video_token_id=VIDEO,
    temporal_patch=2,
    tokens_per_second=3,
)
QWEN_3 = replace(QWEN, architecture="Qwen3VLForConditionalGeneration", tokens_per_second=None)


def url(text: str) -> dict[str, str]:
    return {"Url": text}


def test_addresses_come_in_their_order_and_none_where_there_are_none() -> None:
    media = {"image_url": [url("b"), url("a"), url("b")]}
    assert sent_media({"multi_modal_data": media}, LLAVA) == (Sent("b"), Sent("a"), Sent("b"))
    for nothing in ({}, {"multi_modal_data": None}, {"multi_modal_data": {}}):
        assert sent_media(nothing, LLAVA) == ()
    media |= {"video_url": [url("v")]}
    assert sent_media({"multi_modal_data": media}, QWEN) == (Sent("b"), Sent("a"), Sent("b"), Sent("v", "video"))


def test_a_name_tells_an_embedding_from_a_picture() -> None:
    told = {
        "https://host/a.safetensors?signature=x": "embedding",
        "file:///dir/a.SAFETENSORS": "embedding",
        "data:application/x-safetensors;base64,AAAA": "embedding",
        "data:application/vnd.safetensors,AAAA": "embedding",
        "https://host/a.png?name=.safetensors": "image",
        "https://host/a.safetensors.png": "image",
        "data:image/png;base64,safetensors": "image",
        "data:,x.safetensors": "image",
    }
    for address, kind in told.items():
        assert sent_media({"multi_modal_data": {"image_url": [url(address)]}}, LLAVA) == (Sent(address, kind),)
    (sent,) = sent_media({"multi_modal_data": {"video_url": [url("https://host/a.safetensors")]}}, QWEN)
    assert sent.kind == "video"
    check_placeholders([IMAGE, IMAGE], QWEN, [Sent("a"), Sent("b", "embedding")])


@pytest.mark.parametrize(
    ("media", "says"),
    [
        ({"video_url": [url("v")], "image_url": [url("a")]}, "brings video_url, expected images alone: this model"),
        ({"audio_url": [url("v")]}, "brings audio_url, expected images alone"),
        ({"image_url": [{"UuidOnly": "name"}]}, "only a uuid, expected a url too"),
        ({"image_url": [{"Decoded": {"shape": [1]}}]}, "has no url, expected one"),
        ({"image_url": ["a"]}, "has no url, expected one"),
    ],
)
def test_what_is_no_picture_with_an_address_is_refused(media: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        sent_media({"multi_modal_data": media}, LLAVA)


def test_sound_that_the_frontend_left_out_of_the_media_is_refused_as_other_media_are() -> None:
    part = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "hear"}, part]}]
    wire = {"multi_modal_data": {"image_url": [url("a")]}, "extra_args": {"messages": messages}}
    for config, says in (
        (LLAVA, "brings input_audio, expected images alone: .*; send image_url$"),
        (QWEN, "brings input_audio, expected images and videos alone: .*; send image_url or video_url$"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            sent_media(wire, config)
    with pytest.raises(InvalidRequest, match="brings input_audio, video_url, expected images alone"):
        sent_media(wire | {"multi_modal_data": {"video_url": [url("v")]}}, LLAVA)


@pytest.mark.parametrize(
    ("media", "says"),
    [
        ({"audio_url": [url("v")]}, "brings audio_url, expected images and videos alone: .* image_url or video_url"),
        ({"video_url": [{"UuidOnly": "name"}]}, "a video has only a uuid"),
    ],
)
def test_models_that_take_videos_refuse_the_rest(media: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        sent_media({"multi_modal_data": media}, QWEN)


@pytest.mark.parametrize(
    ("token_ids", "count", "says"),
    [
        ([1, IMAGE, IMAGE], 1, "2 image placeholders and the request 1 images.*leave the placeholder's text out"),
        ([1, 2], 1, "0 image placeholders and the request 1 images.*see the model's template"),
        ([IMAGE], 0, "1 image placeholders and the request 0 images"),
    ],
)
def test_pictures_without_a_place_and_places_without_a_picture_are_refused(
    token_ids: list[int], count: int, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says):
        check_placeholders(token_ids, LLAVA, [Sent("a")] * count)


def test_videos_are_counted_apart_from_pictures() -> None:
    check_placeholders([IMAGE, VIDEO], QWEN, [Sent("a"), Sent("v", "video")])
    check_placeholders([IMAGE, VIDEO], LLAVA, [Sent("a")])  # whose id of that number is a word
    with pytest.raises(InvalidRequest, match="1 image placeholders and the request 0 images"):
        check_placeholders([IMAGE], QWEN, [Sent("v", "video")])
    with pytest.raises(InvalidRequest, match="2 video placeholders and the request 1 videos"):
        check_placeholders([VIDEO, VIDEO], QWEN, [Sent("v", "video")])


@given(
    between=st.lists(st.lists(st.integers(0, 8), max_size=4), min_size=1, max_size=5),
    rows=st.lists(st.integers(1, 6), min_size=4, max_size=4),
)
def test_a_place_becomes_as_long_as_its_picture_and_all_else_stays(between: list[list[int]], rows: list[int]) -> None:
    pictures = [Picture(bytes([index]) * 32, rows[index], (1, 1, rows[index])) for index in range(len(between) - 1)]
    prompt = [token for index, words in enumerate(between) for token in ([IMAGE] if index else []) + words]
    check_placeholders(prompt, LLAVA, [Sent("")] * len(pictures))
    expanded, spans = expand(prompt, LLAVA, pictures)
    assert [token for token in expanded if token != IMAGE] == [token for words in between for token in words]
    assert [(span.key, span.length, span.grid) for span in spans] == [(one.key, one.rows, one.grid) for one in pictures]
    covered = {position for span in spans for position in range(span.start, span.start + span.length)}
    assert covered == {position for position, token in enumerate(expanded) if token == IMAGE}


CLIP = Clip(1.5, (0.25, 1.75))
FILM = Picture(b"v" * 32, 6, (2, 1, 3), CLIP)


def encode(text: str) -> list[int]:
    """Of the marks around a step of a video, and of the text before it, a token a character."""
    marks = {"<|vision_start|>": [100], "<|vision_end|>": [101]}
    return marks.get(text) or [200 + "<0123456789. second>".index(one) for one in text]


def test_positions_in_time_say_when_the_steps_of_a_video_are() -> None:
    still = Picture(b"p" * 32, 2, (1, 1, 2))
    expanded, spans = expand([1, VIDEO, 2, IMAGE], QWEN, [still, FILM])
    assert expanded == [1, *[VIDEO] * 6, 2, IMAGE, IMAGE]
    assert spans == [MediaSpan(1, 6, FILM.key, (2, 1, 3), time_step=4.5), MediaSpan(8, 2, still.key, (1, 1, 2))]


@pytest.mark.parametrize("marks", [True, False])
def test_or_text_before_each_of_them_does(marks: bool) -> None:
    before, after = ([100], [101]) if marks else ([], [])
    expanded, spans = expand([1, *before, VIDEO, *after, 2, 101], QWEN_3, [FILM], encode)
    first, second = encode("<0.2 seconds>"), encode("<1.8 seconds>")  # halves are rounded to even, as in Python
    assert expanded == [1, *first, 100, *[VIDEO] * 3, 101, *second, 100, *[VIDEO] * 3, 101, 2, 101]
    assert [(span.start, span.length, span.first, span.rows, span.grid) for span in spans] == [
        (15, 3, 0, 6, (1, 1, 3)),
        (33, 3, 3, 6, (1, 1, 3)),
    ]
    with pytest.raises(InvalidRequest, match="need a fast tokenizer"):
        expand([VIDEO], QWEN_3, [FILM])


def test_a_video_that_plays_for_longer_than_the_context_leaves_no_room() -> None:
    request = parse({"token_ids": [5, VIDEO]}, context_length=30, sees=True)

    def room(step_s: float) -> int:
        film = Picture(b"v" * 32, 6, (2, 1, 3), Clip(step_s, (0.0, step_s)))
        token_ids, spans = expand(request.token_ids, QWEN, [film])
        found = with_media(request, token_ids, spans, pictures=[film], context_length=30)
        return int(found.sampling["max_tokens"])

    assert (room(1.0), room(4.0)) == (30 - 7, 30 - 7 - 7)  # positions go to 1 + 12
    with pytest.raises(InvalidRequest, match="7 tokens and a video in it plays for 25 positions more"):
        room(10.0)


def seen(wire: dict[str, Any], rows: int = 4, context_length: int = 20) -> WorkerRequest:
    request = parse(wire, context_length=context_length, sees=True)
    pictures = [Picture(b"k" * 32, rows, (1, 2, 2))]
    token_ids, spans = expand(wire["token_ids"], LLAVA, pictures)
    return with_media(
        request, token_ids, spans, pictures=pictures, context_length=context_length, routing=wire.get("mm_routing_info")
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
    with pytest.raises(InvalidRequest, match=r"has media \(image_url\), but this model, or the eng"):
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
    assert expand(WIRE["token_ids"], LLAVA, pictures) == (request.token_ids, list(request.media))
    wire = WIRE | {"prefill_result": {"disaggregated_params": answer}}
    assert roles.handed_over("decode", request, wire) == answer
    assert roles.handed_over("agg", request, wire) is None
    longer = parse(wire | {"token_ids": [5, IMAGE, 6, 7]}, context_length=20, sees=True)  # it moved, with a token more
    assert roles.handed_over("decode", longer, wire) is None


def test_decode_gets_when_a_video_is() -> None:
    request = parse({"token_ids": [5, VIDEO]}, context_length=30, sees=True)
    token_ids, spans = expand(request.token_ids, QWEN, [FILM])
    request = with_media(request, token_ids, spans, pictures=[FILM], context_length=30)
    chunk: dict[str, Any] = {"finish_reason": "length"}

    class Result:
        outputs = (type("Output", (), {"disaggregated_params": DisaggregatedParams(first_gen_tokens=[1])}),)

    handoff.add_to(chunk, Result, request, "prefill-0")
    assert handoff.pictures_of(json.loads(json.dumps(chunk["disaggregated_params"]))) == (FILM,)


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
