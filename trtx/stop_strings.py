"""Stop strings: text is held back while one of them can begin in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trtx.text import TextStream


@dataclass(frozen=True, slots=True)
class Released:
    """Tokens and text that can be sent, because no stop string can begin in them any more.

    ``pieces`` holds the text that each token adds, "" for a token whose character is incomplete. Joined, they equal
    ``text``, except that the last piece before a match may reach into the stop string. ``stop`` is the stop string that
    matched and ended the sequence.
    """

    pieces: tuple[str, ...]
    text: str
    stop: str | None = None


class PlainText:
    """Detokenizes a sequence without stop strings, with the interface of :class:`StopStrings`."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream

    def feed(self, token_ids: Sequence[int], *, is_last: bool) -> Released:
        """Releases all tokens, each with the text that it completes."""
        pieces = [self._stream.feed([token_id]) for token_id in token_ids]
        if is_last and (rest := self._stream.finish()):
            if not pieces:
                return Released((), rest)
            pieces[-1] += rest
        return Released(tuple(pieces), "".join(pieces))


class StopStrings:
    """Finds stop strings across token boundaries, and holds back tokens that may begin one.

    On a match, the text ends exactly where the stop string begins (or ends, with ``include``), and the tokens end
    before the first one that lies wholly inside or behind the stop string.
    """

    def __init__(self, stops: Sequence[str], stream: TextStream, *, include: bool, min_tokens: int) -> None:
        self._stops = tuple(stops)
        self._stream = stream
        self._include = include
        self._min_tokens = min_tokens
        self._longest = max(map(len, stops))
        self._text = ""
        self._num_tokens = 0
        self._searchable = 0  # no match begins before this character
        self._given = 0  # characters released
        self._held: list[int] = []  # for each held token, the character at which it starts

    def feed(self, token_ids: Sequence[int], *, is_last: bool) -> Released:
        """``is_last`` marks the end of the sequence: what is held back is released, unless it is a stop string."""
        for token_id in token_ids:
            before = len(self._text)
            self._held.append(before)
            self._num_tokens += 1
            self._text += self._stream.feed([token_id])
            if len(self._text) > before and (found := self._find(before)) is not None:
                return self._match(*found)
        if is_last:
            before = len(self._text)
            self._text += self._stream.finish()
            if len(self._text) > before and (found := self._find(before)) is not None:
                return self._match(*found)
            return self._release(len(self._text) + 1, len(self._text))
        safe = self._token_border(self._hold_from())
        return self._release(safe, safe)

    def _find(self, before: int) -> tuple[int, str] | None:
        if self._num_tokens <= self._min_tokens:
            self._searchable = len(self._text)
            return None
        start = max(self._searchable, before - self._longest + 1)
        found = [(at, stop) for stop in self._stops if (at := self._text.find(stop, start)) >= 0]
        return min(found, default=None)

    def _match(self, at: int, stop: str) -> Released:
        if self._include:
            released = self._release(at + len(stop), at + len(stop))
        else:
            released = self._release(at, at)
        return Released(released.pieces, released.text, stop)

    def _hold_from(self) -> int:
        """Start of the longest suffix of the text with which a stop string begins."""
        text = self._text
        for start in range(max(self._searchable, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)

    def _token_border(self, at: int) -> int:
        """Start of the token that contains character ``at``.

        Only whole tokens are released: a worker that continues the request after a migration assumes that the client
        has the whole text of every token sent.
        """
        if at == len(self._text) or at in self._held:
            return at
        return max(start for start in self._held if start < at)

    def _release(self, tokens_before: int, text_before: int) -> Released:
        """Releases held tokens that start before character ``tokens_before``, and text before ``text_before``."""
        count = 0
        while count < len(self._held) and self._held[count] < tokens_before:
            count += 1
        starts = [*self._held[:count], *(self._held[count : count + 1] or [len(self._text)])]
        del self._held[:count]
        text = self._text[self._given : text_before]
        self._given = max(self._given, text_before)
        return Released(tuple(self._text[begin:end] for begin, end in pairwise(starts)), text)
