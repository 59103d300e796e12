"""The drafted tokens of one sequence in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from trtx.torch_engine.core.grammar_matcher import GrammarProblem, TokenMatcher
from trtx.torch_engine.core.speculation.drafters import Draft


@dataclass(slots=True, eq=False)
class Drafted:
    """A draft in a step. ``tokens``: the first tokens of ``draft``, which the step verifies.

    ``matchers``: for a guided sequence, the state of its grammar after each of these tokens.
    """

    draft: Draft
    tokens: list[int]
    matchers: list[TokenMatcher] = field(default_factory=list)

    def cut(self, count: int) -> None:
        """Keeps the first ``count`` tokens."""
        del self.tokens[count:], self.matchers[count:]

    def follow(self, matcher: TokenMatcher) -> None:
        """Keeps the leading tokens that the grammar allows and that do not complete its text."""
        place = matcher
        for token in self.tokens:
            place = place.fork()
            try:
                is_complete = place.accept(token)
            except GrammarProblem:
                break
            if is_complete or place.is_exhausted:
                break
            self.matchers.append(place)
        self.cut(len(self.matchers))
