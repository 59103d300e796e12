"""aiperf's text, tokenized once for all calls of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from trtx.bench.aiperf.process import KEPT_VARIABLE
from trtx.checkpoint import resolve_checkpoint


def tokens(monkeypatch: pytest.MonkeyPatch, text: Path, *, corpus: str = "sonnet") -> list[int] | None:
    """What a call of aiperf cuts its prompts from."""
    from aiperf.common import random_generator
    from aiperf.common.tokenizer import Tokenizer
    from aiperf.dataset.generator import prompt

    import trtx.bench.aiperf.kept_corpus
    import trtx.bench.aiperf.local_tokenizer  # noqa: F401 -- as where aiperf is preloaded

    monkeypatch.setattr(prompt, "DEFAULT_CORPUS_FILE", str(text))
    random_generator.reset()
    random_generator.init(7)
    tokenizer = Tokenizer.from_pretrained(str(resolve_checkpoint("synthetic:tiny").path))
    return prompt.PromptGenerator(
        prompts=None, prefix_prompts=None, tokenizer=tokenizer, corpus=prompt.PromptCorpus(corpus)
    )._tokenized_corpus


def test_the_next_call_has_the_same_tokens_without_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, empty = tmp_path / "text.txt", tmp_path / "empty.txt"
    text.write_text("Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\n" * 300)
    empty.touch()
    own = tokens(monkeypatch, text)  # as aiperf itself makes them
    assert own and tokens(monkeypatch, empty) == []
    monkeypatch.setenv(KEPT_VARIABLE, str(tmp_path / "kept"))
    assert tokens(monkeypatch, text) == tokens(monkeypatch, empty) == own
    assert tokens(monkeypatch, text, corpus="random") is None


def test_where_nothing_can_be_kept_each_call_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept").touch()
    monkeypatch.setenv(KEPT_VARIABLE, str(tmp_path / "kept"))
    for words in ("one two three", "four five six"):
        text = tmp_path / "text.txt"
        text.write_text(words)
        assert tokens(monkeypatch, text), words
