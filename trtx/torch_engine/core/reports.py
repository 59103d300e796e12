"""The thread that sends the step loop's reports, so that a slow reader does not stall the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue
from typing import Any

MOST_WAITING = 256
"""Maximum number of queued reports. The loop queues one report per step, so the queue holds seconds of work.

When the queue is full, the loop waits, so that unread reports can't pile up.
"""


class ReportSender:
    """Sends messages in order, from its own thread.

    If ``send`` raises OSError, the other end is gone: later messages are dropped, and the thread that reads the channel
    ends the process. After any other exception of ``send``, the next ``put`` raises that exception.
    """

    def __init__(
        self,
        send: Callable[[Any], None],
        on_error: Callable[[Exception], None] = lambda error: None,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        """``on_error``: called once, in the sending thread, with the exception that the next ``put`` will raise.

        It wakes a sleeping loop.
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
        """Stops the thread. Returns once every queued message was sent or dropped."""
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
