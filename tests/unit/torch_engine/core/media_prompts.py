"""Prompts with media for the oracle: their tokens, their spans, and what the oracle should see of them."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from hypothesis import strategies as st

from tests.unit.torch_engine.core.oracle_runner import VOCAB
from trtx.torch_engine.core.engine_core import EngineCore
from trtx.torch_engine.messages import MediaSpan
from trtx.torch_engine.step import StepEmbedding

PLACEHOLDER = 7


def key_of(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=32).digest()


def embedding_of(name: str, rows: int) -> StepEmbedding:
    return StepEmbedding(rows, [(name, row) for row in range(rows)])  # type: ignore[arg-type]


ROWS = {"a": 3, "b": 6}
some_media = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2)), max_size=2)
"""Names of :data:`ROWS`, and how much text follows each."""


def mixed(length: int, family: int, media: list[tuple[str, int]]) -> MediaPrompt:
    """A prompt of ``length`` tokens of text, or of fewer and some media behind them."""
    parts: list[int | tuple[str, int]] = [min(length, 10) if media else length]
    for name, text in media:
        parts += [(name, ROWS[name]), text]
    return MediaPrompt(parts, family)


@dataclass
class MediaPrompt:
    """``parts``: numbers of text tokens, and (name, rows) of media."""

    parts: list[int | tuple[str, int]]
    family: int = 0

    @property
    def tokens(self) -> list[int]:
        found: list[int] = []
        for part in self.parts:
            if isinstance(part, int):
                found += [(self.family * 31 + (len(found) + i) * 11 + 3) % VOCAB for i in range(part)]
            else:
                found += [PLACEHOLDER] * part[1]
        return found

    @property
    def spans(self) -> list[MediaSpan]:
        found, at = [], 0
        for part in self.parts:
            if not isinstance(part, int):
                found.append(MediaSpan(at, part[1], key_of(part[0])))
            at += part if isinstance(part, int) else part[1]
        return found

    @property
    def seen(self) -> list[Any]:
        found: list[Any] = list(self.tokens)
        at = 0
        for part in self.parts:
            if not isinstance(part, int):
                found[at : at + part[1]] = [(part[0], row) for row in range(part[1])]
            at += part if isinstance(part, int) else part[1]
        return found

    def put(self, core: EngineCore) -> None:
        for part in self.parts:
            if not isinstance(part, int):
                core.scheduler.media.put(key_of(part[0]), embedding_of(*part))
