"""The thread that sends the step loop's reports, so that a slow reader does not stall the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue
from typing import Any

MOST_WAITING = 256
"""Limit of queued reports, one for each step: seconds of work.

Beyond it the loop waits, so that unread reports can't pile up.
"""


class ReportSender:
    """Sends messages in order, from its own thread.

    An OSError from ``send`` stops the sending: the other end is gone, and the thread that reads the channel ends the
    process. The next ``put`` raises any other exception from ``send``.
    """

    def __init__(
        self,
        send: Callable[[Any], None],
        on_error: Callable[[Exception], None] = lambda error: None,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        """``on_error`` is called once, in the sending thread, with the exception of ``send``, to wake a sleeping
        loop.
        """
        self._send = send
        self._on_error = on_error
        self._waiting: Queue[Any] = Queue(most_waiting)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine-reports", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        """Queues a message. Blocks while ``most_waiting`` messages are queued."""
        if self._error is not None:
            raise self._error
        self._waiting.put(message)

    def close(self) -> None:
        """Returns once all queued messages are sent, or can't be sent."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        send: Callable[[Any], None] | None = self._send
        while (message := self._waiting.get()) is not None:
            try:
                if send is not None:
                    send(message)
            except OSError:
                send = None
            except Exception as error:
                send, self._error = None, error
                self._on_error(error)
