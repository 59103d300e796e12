"""The thread that sends what the step loop says: a caller that reads slowly does not hold up the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue
from typing import Any

MOST_WAITING = 256
"""Reports, of a step each: seconds of work. Beyond them the loop waits, since what nobody reads may not pile up."""


class ReportSender:
    """Sends messages in order from a thread of its own.

    An OSError of ``send`` ends the sending: nobody is left to tell, and whoever watches the channel ends the process.
    What else it raises, the next ``put`` raises.
    """

    def __init__(
        self,
        send: Callable[[Any], None],
        on_error: Callable[[Exception], None] = lambda error: None,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        """``on_error``: called in the thread, once, with what ``send`` raised, for a loop that sleeps meanwhile."""
        self._send = send
        self._on_error = on_error
        self._waiting: Queue[Any] = Queue(most_waiting)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine-reports", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        """Returns at once while fewer than ``most_waiting`` messages wait, else when the thread has taken one."""
        if self._error is not None:
            raise self._error
        self._waiting.put(message)

    def close(self) -> None:
        """Returns when all that was put is sent, or can't be."""
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
