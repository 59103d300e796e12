"""Dynamo's test hook for logits processors."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from trtx.worker.requests.dynamo_test_hook import TEXT, VARIABLE, ForcedText


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"Hello": 5, "world": 6, "!": 7, "<unk>": 0}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def test_the_hook_is_off_unless_its_variable_is_1() -> None:
    for environment in ({}, {VARIABLE: "0"}, {VARIABLE: "true"}):
        assert ForcedText.of(environment, tokenizer(), (2,)) is None
    assert ForcedText.of({VARIABLE: "1"}, None, (2,)) is None


def test_each_token_follows_from_the_number_of_tokens_before_it() -> None:
    forced = ForcedText.of({VARIABLE: "1"}, tokenizer(), (2, 3))
    assert forced is not None and TEXT == "Hello world!"
    prompt = [9, 9, 9]
    said: list[int] = []
    while not said or said[-1] != 2:
        logits = torch.randn(1, 1, 12)
        forced.after(len(prompt))(1, logits, [prompt + said], None, None)
        assert logits.isfinite().sum() == 1
        said.append(int(logits.argmax()))
    assert said == [5, 6, 7, 2]
