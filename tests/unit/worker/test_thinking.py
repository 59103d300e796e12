"""From which token on an answer's grammar holds."""

from __future__ import annotations

import pytest

from trtx.checkpoint import resolve_checkpoint
from trtx.text import load_tokenizer
from trtx.worker.requests.thinking import Thinking


def test_a_grammar_waits_for_the_end_of_thinking_that_the_prompt_began() -> None:
    thinking = Thinking(start_id=8, end_id=9)
    assert thinking.limits([1, 2, 8]) == {"thinking_end_id": 9}
    assert thinking.limits([1, 8, 3, 9, 4]) == {}, "the template has closed the thinking"
    assert thinking.limits([1, 2, 3]) == {"thinking_end_id": 9, "thinking_start_id": 8}
    assert thinking.limits([9, *range(20, 60)]) == {"thinking_end_id": 9, "thinking_start_id": 8}, "an earlier turn's"


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
def test_marks_that_are_tokens_are_found(parser: str) -> None:
    tokenizer = load_tokenizer(resolve_checkpoint("synthetic:tiny-tools").path)
    found = Thinking.of(parser, tokenizer)
    assert found is not None
    assert tokenizer.decode([found.start_id], skip_special_tokens=False) == "<think>"
    assert tokenizer.decode([found.end_id], skip_special_tokens=False) == "</think>"


@pytest.mark.parametrize(("parser", "model"), [(None, "tiny-tools"), ("gpt_oss", "tiny-tools"), ("qwen3", "tiny")])
def test_a_model_without_such_tokens_follows_a_grammar_from_the_first_token(parser: str | None, model: str) -> None:
    assert Thinking.of(parser, load_tokenizer(resolve_checkpoint(f"synthetic:{model}").path)) is None
