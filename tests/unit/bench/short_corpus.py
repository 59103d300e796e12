"""aiperf's dataset loaders without what they read at their start for prompts that they make up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def short_corpus(directory: Path) -> Iterator[None]:
    """aiperf makes up prompts of one line of text, where a test asks for none: to make tokens of Shakespeare's works
    takes 9 s."""
    from aiperf.dataset.generator import prompt

    corpus = directory / "corpus.txt"
    corpus.write_text("From fairest creatures we desire increase\n" * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt, "DEFAULT_CORPUS_FILE", str(corpus))
        yield
