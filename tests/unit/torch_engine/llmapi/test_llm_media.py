"""What a prompt dict says of images, before any engine sees it: where they stand, and what they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from trtx.checkpoint.vision import VisionConfig
from trtx.torch_engine.llmapi import RequestError
from trtx.torch_engine.llmapi.media import read_media

IMAGE = 9
SEES = VisionConfig("LlavaForConditionalGeneration", hidden_size=4, image_token_id=IMAGE, tokens_per_image=3)
BY_GRID = VisionConfig("Qwen2_5_VLForConditionalGeneration", 4, IMAGE, None, spatial_merge=2)


def image(rows: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((rows, 4), value)


def embeddings(*images: torch.Tensor, **more: Any) -> dict[str, Any]:
    return {"multi_modal_embeddings": {"image": list(images)} | more}


@settings(max_examples=examples(100), deadline=None)
@given(parts=st.lists(st.one_of(st.integers(1, 4), st.integers(-4, -1)), min_size=1, max_size=8))
def test_a_prompt_with_a_placeholder_an_image_and_its_expansion_are_one(parts: list[int]) -> None:
    """``parts``: numbers of text tokens, and negative ones of an image's rows."""
    rows = [-part for part in parts if part < 0]
    short = [token for part in parts for token in ([IMAGE] if part < 0 else [5] * part)]
    long = [token for part in parts for token in ([IMAGE] * -part if part < 0 else [5] * part)]
    said = embeddings(*(image(count, at) for at, count in enumerate(rows))) if rows else {}
    found = [read_media(said, ids, SEES) for ids in (short, long)]
    assert found[0][0] == found[1][0] == long
    assert found[0][1].spans == found[1][1].spans
    assert [span.length for span in found[0][1].spans] == rows
    places = [at for span in found[0][1].spans for at in range(span.start, span.start + span.length)]
    assert places == [at for at, token in enumerate(long) if token == IMAGE]
    assert len({span.key for span in found[0][1].spans}) == len(rows)


def key(said: dict[str, Any], sees: VisionConfig = SEES) -> bytes:
    return read_media(said, [IMAGE], sees)[1].spans[0].key


def test_a_key_is_of_numbers_their_form_their_grid_and_the_uuid() -> None:
    one = image(4, 1.0)
    assert key(embeddings(one)) == key(embeddings(one.clone())) == key(embeddings(one.t().contiguous().t()))
    others = [
        key(embeddings(one)),
        key(embeddings(image(4, 2.0))),
        key(embeddings(one.half())),
        key(embeddings(one.reshape(2, 8))),
        key(embeddings(one) | {"multi_modal_uuids": {"image": ["a"]}}),
        key(embeddings(one) | {"multi_modal_uuids": {"image": ["b"]}}),
        *(key(embeddings(one, image_grid_thw=[grid]), BY_GRID) for grid in ((1, 4, 4), (1, 2, 8), (1, 8, 2))),
    ]
    assert len(set(others)) == len(others)


def test_what_says_nothing_is_no_media_for_any_model() -> None:
    nothing = {"multi_modal_data": None, "multi_modal_embeddings": {}, "mm_processor_kwargs": {}, "prompt": "x"}
    for sees in (None, SEES):
        ids, media = read_media(nothing, [IMAGE, 5], sees)
        assert ids == [IMAGE, 5] and not media.spans
    with pytest.raises(RequestError, match="multi_modal_data, multi_modal_embeddings, and the model is a text model"):
        read_media(embeddings(image(1)) | {"multi_modal_data": {"image": 1}}, [IMAGE], None)
