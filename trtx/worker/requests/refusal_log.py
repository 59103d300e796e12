"""What a worker refuses, in its log: the client sees the sentence only on some routes (docs/architecture.md)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

MOST_LINES = 20
PERIOD_SECONDS = 60.0
"""Clients decide how much is refused: so many lines in a period, and none of them fills a disk."""
MOST_CHARACTERS = 1000


class RefusalLog:
    """At WARNING, which workers show by default."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._lines = 0

    def tell(self, request: str, sentence: str) -> None:
        """``request``: its id. Both may hold what a client wrote."""
        now = self._clock()
        if now - self._since >= PERIOD_SECONDS:
            self._since, self._lines = now, 0
        self._lines += 1
        if self._lines > MOST_LINES:
            return
        logger.warning("request %s refused: %s", _one_line(request), _one_line(sentence))
        if self._lines == MOST_LINES:
            logger.warning(
                "%d requests were refused within %g s; further ones until then are counted alone, as "
                'trtx_requests_total{outcome="invalid"}',
                MOST_LINES,
                PERIOD_SECONDS,
            )


def _one_line(text: str) -> str:
    """A line break of a client's makes no line of the log."""
    shown = "".join(character if character.isprintable() else " " for character in text[: MOST_CHARACTERS + 1])
    return shown if len(shown) <= MOST_CHARACTERS else shown[:MOST_CHARACTERS] + "…"
