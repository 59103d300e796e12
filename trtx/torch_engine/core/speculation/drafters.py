"""Drafters that guess a sequence's next tokens from tokens that occurred before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

TOKENS_AT_ONCE = 4096
"""Tokens of one sequence that a step indexes: about 5 ms. A longer prompt is indexed over several steps."""
MOST_PATTERNS = 1 << 18
"""Patterns of the public pool before it begins a new generation; two generations are kept."""

_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed next tokens. ``strength``: number of tokens that matched before them."""

    tokens: list[int] = field(default_factory=list)
    strength: int = 0


NO_DRAFT = Draft()


class DraftState(Protocol):
    """What a drafter knows of one sequence."""

    tokens: list[int]


class Drafter(Protocol):
    def begin(self, cache_salt: str | None) -> DraftState:
        """Returns the state of a new sequence."""

    def draft(self, state: DraftState, most: int) -> Draft:
        """Guesses at most ``most`` tokens after ``state.tokens``. The caller has added all known tokens to them."""


@dataclass(slots=True, eq=False)
class Indexed:
    """A sequence's tokens. The patterns that end before position ``indexed`` are in ``pool``."""

    pool: PatternPool
    tokens: list[int] = field(default_factory=list)
    indexed: int = 1


class PatternPool:
    """Finds where the tokens after a pattern begin. Its memory is bounded: a full pool drops the older half of its
    patterns.
    """

    def __init__(self, *, keeps_newest: bool) -> None:
        self._keeps_newest = keeps_newest
        self._patterns: dict[tuple[int, ...], tuple[Indexed, int]] = {}
        self._older: dict[tuple[int, ...], tuple[Indexed, int]] = {}

    def add(self, state: Indexed, ends: Iterable[int], most_tokens: int) -> None:
        """Adds the patterns of up to ``most_tokens`` tokens that end before the positions ``ends``."""
        tokens, patterns, keeps_newest = state.tokens, self._patterns, self._keeps_newest
        for end in ends:
            for begin in range(max(0, end - most_tokens), end):
                pattern = tuple(tokens[begin:end])
                if keeps_newest or pattern not in patterns:
                    patterns[pattern] = (state, end)
        if len(patterns) > MOST_PATTERNS:
            self._older, self._patterns = patterns, {}

    def find(self, pattern: tuple[int, ...]) -> tuple[Indexed, int] | None:
        if self._keeps_newest:
            return self._patterns.get(pattern) or self._older.get(pattern)
        return self._older.get(pattern) or self._patterns.get(pattern)


class NGramDrafter:
    """TensorRT-LLM's NGram: the tokens that followed the longest match of the last tokens.

    All sequences without a ``cache_salt`` share the public pool. A salted sequence has its own pool, so its tokens are
    never drafted for another sequence.
    """

    def __init__(
        self, *, max_matching_ngram_size: int, is_keep_all: bool, is_use_oldest: bool, is_public_pool: bool
    ) -> None:
        """Without ``is_keep_all``, the pool keeps only the first continuation of each pattern, as TensorRT-LLM does."""
        self._size = max_matching_ngram_size
        self._keeps_newest = is_keep_all and not is_use_oldest
        self._public = self._new_pool() if is_public_pool else None

    def _new_pool(self) -> PatternPool:
        return PatternPool(keeps_newest=self._keeps_newest)

    def begin(self, cache_salt: str | None) -> Indexed:
        return Indexed(self._new_pool() if self._public is None or cache_salt is not None else self._public)

    def draft(self, state: DraftState, most: int) -> Draft:
        assert isinstance(state, Indexed)
        tokens = state.tokens
        end = min(len(tokens), state.indexed + TOKENS_AT_ONCE)
        state.pool.add(state, range(state.indexed, end), self._size)
        state.indexed = max(state.indexed, end)
        for size in range(min(self._size, len(tokens) - 1), 0, -1):
            if (found := state.pool.find(tuple(tokens[-size:]))) is not None:
                source, at = found
                if following := source.tokens[at : at + most]:
                    return Draft(following, size)
        return NO_DRAFT
