"""A drafter that finds the longest suffix of a sequence that occurred before, with a suffix automaton."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtx.torch_engine.core.speculation.drafters import NO_DRAFT, TOKENS_AT_ONCE, Draft, DraftState

MOST_TOKENS = 1 << 15
"""Tokens of a prompt that an automaton holds, its last ones: about 20 MB."""
MOST_POOL_STATES = 1 << 18
"""States of the global pool before it begins anew, about 1.5 for each token: about 100 MB."""


class SuffixAutomaton:
    """Finds earlier occurrences of a sequence's suffixes in all sequences that were added.

    Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985); each token takes amortized
    constant time. A state stands for all suffixes that end at the same positions. ``lengths``: number of tokens of the
    state's longest suffix. ``ends``: the first of these positions that a token follows, as (sequence, number of its
    tokens up to the position). ``links``: state of the longest shorter suffix, which ends at more positions.
    """

    def __init__(self) -> None:
        self.num_sequences = 0
        self.lengths = [0]
        self.ends: list[tuple[SuffixState, int] | None] = [None]
        self.links = [-1]
        self.following: list[dict[int, int]] = [{}]

    def begin(self) -> SuffixState:
        self.num_sequences += 1
        return SuffixState(self)

    def extend(self, last: int, token: int, end: tuple[SuffixState, int]) -> int:
        """Adds ``token`` to the sequence whose whole text ``last`` stands for. Returns the state of the longer text."""
        lengths, links, following = self.lengths, self.links, self.following
        if token in following[last]:  # another sequence began with the same text
            same = self._split(last, token)
            self._revive(same, end)
            return same
        new = self._state(lengths[last] + 1, end, {})
        state = last
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = links[state]
        links[new] = 0 if state < 0 else self._split(state, token)
        self._revive(links[new], end)
        return new

    def _revive(self, state: int, end: tuple[SuffixState, int]) -> None:
        """Sets the position of a state, and of the states of its shorter suffixes, to ``end`` if no token followed the
        old one.
        """
        while state > 0 and (first := self.ends[state]) is not None and len(first[0].tokens) <= first[1]:
            self.ends[state] = end
            state = self.links[state]

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

    def _state(self, length: int, end: tuple[SuffixState, int] | None, following: dict[int, int]) -> int:
        self.lengths.append(length)
        self.ends.append(end)
        self.links.append(-1)
        self.following.append(following)
        return len(self.lengths) - 1


@dataclass(slots=True, eq=False)
class SuffixState:
    """A sequence: the automaton holds ``tokens[first:first + num_added]``, which its state ``last`` stands for."""

    automaton: SuffixAutomaton
    tokens: list[int] = field(default_factory=list)
    first: int = -1  # set by the first call of add
    num_added: int = 0
    last: int = 0

    def add(self, most: int) -> bool:
        """Adds at most ``most`` of the tokens that are not added yet. Returns whether all are added."""
        if self.first < 0:
            self.first = max(0, len(self.tokens) - MOST_TOKENS)
        begin = self.first + self.num_added
        for at, token in enumerate(self.tokens[begin : begin + most], begin + 1):
            self.last = self.automaton.extend(self.last, token, (self, at))
            self.num_added += 1
        return self.first + self.num_added == len(self.tokens)

    def continued(self, longest: int, most: int) -> Draft:
        """Returns at most ``most`` tokens that followed the longest suffix of at most ``longest`` tokens before.

        If no token follows that suffix yet, as at the end of this sequence, a shorter suffix decides.
        """
        automaton = self.automaton
        state = self.last
        while state > 0:
            link, end = automaton.links[state], automaton.ends[state]
            if automaton.lengths[link] < longest and end is not None:
                source, at = end
                if following := source.tokens[at : at + most]:
                    return Draft(following, min(automaton.lengths[state], longest))
            state = link
        return NO_DRAFT


class SuffixDrafter:
    """TensorRT-LLM's SA: the tokens that followed the first place of the longest suffix that occurred before.

    The global pool holds all sequences without a ``cache_salt``. A sequence with a salt searches only its own tokens,
    as every sequence does without the pool.

    Differences to ``SADecodingConfig`` of TensorRT-LLM's llm_args.py (the main branch between 1.3.0rc20 and 1.3.0rc22):
    the fields mean the same, and the answers are the same. Upstream's pool holds ``global_pool_size`` requests, max(64,
    max_batch_size) by default, then evicts the oldest one that has ended, and it matches at most 64 tokens. Here one
    automaton holds all sequences and can't forget a single one, so a full pool begins anew. Its matches have any
    length.
    """

    def __init__(
        self, *, max_matching_ngram_size: int, enable_global_pool: bool = False, global_pool_size: int | None = None
    ) -> None:
        """``max_matching_ngram_size`` below 1: no limit. ``global_pool_size``: sequences that the pool holds before it
        begins anew; None: as many as fit. Sequences that are decoding then keep the pool that they began with."""
        self._longest = max_matching_ngram_size if max_matching_ngram_size > 0 else MOST_TOKENS
        self._most_sequences = global_pool_size
        self._pool = SuffixAutomaton() if enable_global_pool else None

    def begin(self, cache_salt: str | None) -> SuffixState:
        if self._pool is None or cache_salt is not None:
            return SuffixAutomaton().begin()
        if self._pool.num_sequences == self._most_sequences or len(self._pool.lengths) > MOST_POOL_STATES:
            self._pool = SuffixAutomaton()
        return self._pool.begin()

    def draft(self, state: DraftState, most: int) -> Draft:
        assert isinstance(state, SuffixState)
        return state.continued(self._longest, most) if state.add(TOKENS_AT_ONCE) else NO_DRAFT
