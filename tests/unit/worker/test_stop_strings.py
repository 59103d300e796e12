"""Where the worker looks for stop strings it makes the text, so it keeps to what the frontend would have done."""

from __future__ import annotations

from typing import Any

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.text import load_tokenizer
from trtx.worker.loading import LoadedEngine
from trtx.worker.request import parse


@pytest.mark.parametrize(("asked", "text"), [(None, "bc"), (True, "bc"), (False, "b<|im_start|>c")])
def test_special_tokens_are_in_the_text_as_the_client_asked(asked: bool | None, text: str) -> None:
    tokenizer = load_tokenizer(resolve_checkpoint("synthetic:tiny").path)
    tokens = [tokenizer.encode(piece, add_special_tokens=False).ids[0] for piece in ("b", "<|im_start|>", "c")]
    facts: dict[str, Any] = dict.fromkeys(LoadedEngine.__dataclass_fields__)
    engine = LoadedEngine(**{**facts, "tokenizer": tokenizer})
    request = {
        "token_ids": [5],
        "stop_conditions": {"stop": ["never"]},
        "output_options": {"skip_special_tokens": asked},
    }
    stops = engine.stop_strings(parse(request, context_length=10))
    assert stops.feed(tokens, is_last=True).text == text
