"""A drafter that finds the longest suffix of a sequence that occurred in it before, with a suffix automaton."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtx.torch_engine.core.speculation.drafters import NO_DRAFT, TOKENS_AT_ONCE, Draft, DraftState

MOST_TOKENS = 1 << 15
"""Tokens of a prompt that the automaton holds, its last ones: about 20 MB."""


@dataclass(slots=True, eq=False)
class SuffixAutomaton:
    """The automaton of ``tokens[first:first + num_added]``. Blumer et al., "The smallest automaton recognizing the
    subwords of a text" (1985); each token takes amortized constant time.

    A state stands for the suffixes that end at the same positions: ``lengths`` is the longest one's number of tokens,
    ``ends`` the first of these positions, and ``links`` the state of the longest suffix that also ends elsewhere.
    """

    tokens: list[int] = field(default_factory=list)
    first: int = -1  # set by the first call of add
    num_added: int = 0
    lengths: list[int] = field(default_factory=lambda: [0])
    ends: list[int] = field(default_factory=lambda: [0])
    links: list[int] = field(default_factory=lambda: [-1])
    following: list[dict[int, int]] = field(default_factory=lambda: [{}])
    last: int = 0

    def add(self, most: int) -> bool:
        """Adds at most ``most`` of the tokens that are not added yet. Returns whether all are added."""
        if self.first < 0:
            self.first = max(0, len(self.tokens) - MOST_TOKENS)
        begin = self.first + self.num_added
        for token in self.tokens[begin : begin + most]:
            self._add(token)
        return self.first + self.num_added == len(self.tokens)

    def _add(self, token: int) -> None:
        lengths, links, following = self.lengths, self.links, self.following
        self.num_added += 1
        new = self._state(lengths[self.last] + 1, self.num_added, {})
        state = self.last
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = links[state]
        links[new] = 0 if state < 0 else self._split(state, token)
        self.last = new

    def _split(self, state: int, token: int) -> int:
        """Returns the state that ``token`` leads to from ``state``, for suffixes one longer than those of ``state``."""
        target = self.following[state][token]
        length = self.lengths[state] + 1
        if self.lengths[target] == length:
            return target
        clone = self._state(length, self.ends[target], dict(self.following[target]))
        self.links[clone], self.links[target] = self.links[target], clone
        while state >= 0 and self.following[state].get(token) == target:
            self.following[state][token] = clone
            state = self.links[state]
        return clone

    def _state(self, length: int, end: int, following: dict[int, int]) -> int:
        self.lengths.append(length)
        self.ends.append(end)
        self.links.append(-1)
        self.following.append(following)
        return len(self.lengths) - 1

    def longest_repeat(self, most: int) -> tuple[int, int]:
        """Returns the length of the longest repeated suffix, at most ``most``, and the position after its first place.

        The length is 0 if no suffix occurred before.
        """
        state = self.links[self.last] if self.num_added else 0
        while state > 0 and self.lengths[self.links[state]] >= most:
            state = self.links[state]
        return min(self.lengths[state], most), self.first + self.ends[state]


class SuffixDrafter:
    """TensorRT-LLM's SA: the tokens that followed the first place of the longest repeated suffix."""

    def __init__(self, *, max_matching_ngram_size: int) -> None:
        """``max_matching_ngram_size`` below 1: no limit."""
        self._most = max_matching_ngram_size if max_matching_ngram_size > 0 else MOST_TOKENS

    def begin(self, cache_salt: str | None) -> SuffixAutomaton:
        return SuffixAutomaton()

    def draft(self, state: DraftState, most: int) -> Draft:
        assert isinstance(state, SuffixAutomaton)
        if not state.add(TOKENS_AT_ONCE):
            return NO_DRAFT
        length, at = state.longest_repeat(self._most)
        return Draft(state.tokens[at : at + most], length) if length else NO_DRAFT
