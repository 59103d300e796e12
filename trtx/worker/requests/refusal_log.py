"""Logs refused requests: the client sees the message on some routes only (docs/upstream/dynamo.md)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

MOST_LINES = 20
PERIOD_SECONDS = 60.0
"""Period in which at most MOST_LINES lines are logged. Clients decide how much is refused, and must not fill a disk."""
MOST_CHARACTERS = 1000


class RefusalLog:
    """Logs refusals at WARNING, the workers' default level."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._lines = 0

    def tell(self, request: str, sentence: str) -> None:
        """Logs the refusal of the request with id ``request``. Both arguments may contain text that a client wrote."""
        now = self._clock()
        if now - self._since >= PERIOD_SECONDS:
            self._since, self._lines = now, 0
        self._lines += 1
        if self._lines > MOST_LINES:
            return
        logger.warning("request %s refused: %s", _one_line(request), _one_line(sentence))
        if self._lines == MOST_LINES:
            logger.warning(
                "%d requests were refused within %g s; further ones in this period are only counted, as "
                'trtx_requests_total{outcome="invalid"}',
                MOST_LINES,
                PERIOD_SECONDS,
            )


def _one_line(text: str) -> str:
    """``text`` shortened and without control characters, so that a client can't forge lines in the log."""
    shown = "".join(character if character.isprintable() else " " for character in text[: MOST_CHARACTERS + 1])
    return shown if len(shown) <= MOST_CHARACTERS else shown[:MOST_CHARACTERS] + "…"
