"""Where the worker looks for stop strings it makes the text, so it keeps to what the frontend would have done."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from trtx.checkpoint import resolve_checkpoint
from trtx.stop_strings import StopStrings
from trtx.text import load_tokenizer
from trtx.worker.loading import LoadedEngine
from trtx.worker.requests.request import parse


@pytest.mark.parametrize(("asked", "text"), [(None, "bc"), (True, "bc"), (False, "b<|im_start|>c")])
def test_special_tokens_are_in_the_text_as_the_client_asked(asked: bool | None, text: str) -> None:
    tokenizer = load_tokenizer(resolve_checkpoint("synthetic:tiny").path)
    tokens = [tokenizer.encode(piece, add_special_tokens=False).ids[0] for piece in ("b", "<|im_start|>", "c")]
    stops = stop_strings(tokenizer, [5], "never", skip_special_tokens=asked)
    assert stops.feed(tokens, is_last=True).text == text


def test_the_space_that_an_answer_begins_with_stays() -> None:
    """Llama 2's tokenizer, in small: it takes the space from the beginning of whatever it decodes."""
    tokenizer = Tokenizer(models.BPE(vocab={"▁the": 0, "▁red": 1, "▁door": 2}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    whole = stop_strings(tokenizer, [0], "never").feed([1, 2], is_last=True)
    assert (whole.text, whole.pieces) == (" red door", (" red", " door"))
    assert stop_strings(tokenizer, [0], " red").feed([1, 2], is_last=True).stop == " red"
    assert stop_strings(tokenizer, [0, 1], "never").feed([2], is_last=True).text == " door"


def test_half_a_character_that_a_prompt_ends_with_is_not_in_the_answer() -> None:
    tokenizer = load_tokenizer(resolve_checkpoint("synthetic:tiny").path)
    *_, half = tokenizer.encode("aé", add_special_tokens=False).ids[:2]
    letters = tokenizer.encode("bc", add_special_tokens=False).ids
    assert tokenizer.decode([half]) == "\N{REPLACEMENT CHARACTER}"
    assert stop_strings(tokenizer, [5, half], "never").feed(letters, is_last=True).text == "bc"


def stop_strings(tokenizer: Any, prompt: list[int], stop: str, **output_options: Any) -> StopStrings:
    facts: dict[str, Any] = dict.fromkeys(LoadedEngine.__dataclass_fields__)
    engine = LoadedEngine(**{**facts, "tokenizer": tokenizer})
    request = {"token_ids": prompt, "stop_conditions": {"stop": [stop]}, "output_options": output_options}
    found = engine.text_of(parse(request, context_length=10))
    assert isinstance(found, StopStrings)
    return found
