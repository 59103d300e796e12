"""Which pictures TensorRT-LLM is asked to take, as far as config.json and the loaded package say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtx.engine.tensorrt_llm.multimodal import image_token_id, placeholder_of, takes_handles
from trtx.errors import LaunchError

SEES: dict[str, Any] = {"vision_config": {}, "image_token_index": 9}


def model(directory: Path, **config: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SEES, 9),
        ({"vision_config": {}, "image_token_id": 8}, 8),
        ({"image_token_id": 8}, None),
        ({"vision_config": {}}, None),
        ({"vision_config": {}, "image_token_id": 8, "image_token_index": 8}, 8),
    ],
)
def test_the_placeholder_is_config_jsons(tmp_path: Path, config: dict[str, Any], expected: int | None) -> None:
    assert placeholder_of(model(tmp_path, **config)) == expected


def test_two_placeholders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="image_token_id and image_token_index, which differ"):
        placeholder_of(model(tmp_path, **SEES, image_token_id=8))


def test_a_release_without_preprocess_takes_no_images_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = model(tmp_path, **SEES)
    assert image_token_id(SimpleNamespace(preprocess=len), directory) == 9
    assert caplog.text == ""
    assert image_token_id(SimpleNamespace(), directory) is None
    assert "no LLM.preprocess, which came after 1.3.0rc7" in caplog.text


@pytest.mark.parametrize(
    ("backend", "supports", "expected"),
    [("pytorch", True, True), ("pytorch", False, False), ("_autodeploy", True, False)],
)
def test_handles_are_for_models_whose_processor_takes_them(backend: str, supports: bool, expected: bool) -> None:
    processor = SimpleNamespace(support_mm_disagg=supports)
    llm = SimpleNamespace(input_processor=processor, args=SimpleNamespace(backend=backend))
    assert takes_handles(llm) is expected
    assert not takes_handles(SimpleNamespace(args=llm.args)), "a release whose LLM has no such attribute"
