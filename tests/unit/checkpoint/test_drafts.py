"""Which draft models fit a target model, and what is said of those that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtx.checkpoint import read_model_config, resolve_checkpoint
from trtx.checkpoint.drafts import check_draft_of, find_draft, read_eagle_config
from trtx.errors import UsageError

TARGET = "synthetic:tiny-trained"
HEAD = "synthetic:tiny-eagle3"


def speculation(kind: str, model: str, **more: Any) -> dict[str, Any]:
    return {"decoding_type": kind, "max_draft_len": 4, "speculative_model": model, **more}


@pytest.mark.parametrize(
    "spec",
    [
        speculation("Draft_Target", "synthetic:tiny-draft"),
        speculation("Draft_Target", TARGET),
        speculation("Eagle3", HEAD),
        speculation("Eagle3", HEAD, eagle3_layers_to_capture=[2, 0, 1]),
        {"decoding_type": "Eagle3", "speculative_model_dir": HEAD},
        {"decoding_type": "NGram", "max_draft_len": 4},
    ],
)
def test_a_draft_model_that_fits_is_taken(spec: dict[str, Any]) -> None:
    check_draft_of(spec, resolve_checkpoint(TARGET).path)


@pytest.mark.parametrize(
    ("target", "spec", "message"),
    [
        (TARGET, speculation("Draft_Target", "synthetic:tiny-moe"), "has 4096 tokens and tiny_trained has 1024"),
        (TARGET, speculation("Draft_Target", "synthetic:tiny-tools"), "have different tokenizers"),
        ("synthetic:tiny-tools", speculation("Eagle3", HEAD), "hidden_size is 256, and the target model has 128"),
        (TARGET, speculation("Eagle3", "synthetic:tiny"), "the synthetic EAGLE-3 head is synthetic:tiny-eagle3"),
        (TARGET, speculation("Eagle3", "/nowhere"), "speculative_model is '/nowhere', .* or synthetic:tiny-eagle3$"),
        (TARGET, speculation("Draft_Target", "/nowhere"), "speculative_model is '/nowhere', .* synthetic:tiny-draft$"),
        (TARGET, speculation("Eagle3", "/"), "has no config.json; expected the directory of an EAGLE-3 head"),
        (TARGET, speculation("Eagle3", "synthetic:tiny-eagle3-of-2"), "the synthetic EAGLE-3 head is"),
        (TARGET, speculation("Eagle3", HEAD, eagle3_layers_to_capture=[0, 1]), "expected three different layers"),
        ("synthetic:tiny-vl", speculation("Draft_Target", "synthetic:tiny-vl"), "has a vision tower"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(target: str, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_draft_of(spec, resolve_checkpoint(target).path)


def test_a_target_without_a_layer_that_attends_to_all_positions_is_refused(tmp_path: Path) -> None:
    shape = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0, "layer_types": None}
    config = json.loads((resolve_checkpoint(TARGET).path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | shape))
    with pytest.raises(UsageError, match="every layer of .* has a sliding window; draft with NGram or SA"):
        check_draft_of(speculation("Eagle3", HEAD), tmp_path)


def test_layers_come_from_the_engine_config_else_from_the_head_else_from_tensorrt_llm(tmp_path: Path) -> None:
    target = read_model_config(resolve_checkpoint("synthetic:qwen3-8b").path)
    config = json.loads((find_draft(HEAD, "Eagle3") / "config.json").read_text())
    head = config | {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    (tmp_path / "config.json").write_text(json.dumps(head))
    assert read_eagle_config(tmp_path, target, layers=[5, 9, 7]).captured == (5, 7, 9)
    assert read_eagle_config(tmp_path, target).captured == (-1, 1, 2)
    (tmp_path / "config.json").write_text(json.dumps(head | {"eagle_config": None}))
    assert read_eagle_config(tmp_path, target).captured == (1, 17, 32)
