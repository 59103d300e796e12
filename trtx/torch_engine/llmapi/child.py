"""The parent's end of a child process: starts it, reads its messages, notices its death, ends it."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from trtx.config.secrets import without_secrets
from trtx.errors import UsageError
from trtx.ipc.child_messages import Fatal, Progress
from trtx.torch_engine.channel import Channel

logger = logging.getLogger(__name__)

STDERR_LINES = 20
"""Number of a process's last output lines that a death notice includes."""
EXIT_GRACE_S = 5.0

Message = TypeVar("Message")


class ChildProcess(Generic[Message]):
    """One child process, controlled through a socket; :meth:`start` starts it.

    ``take`` gets each message except ``Progress`` and ``Fatal``, and sets the result of ``ready`` once the child is
    ready. ``buried`` gets the death notice once. Both run in threads of this object. Messages that have no answer when
    the child dies never get one. ``ready`` fails with UsageError for wrong arguments, and with the death notice if the
    child dies before.
    """

    def __init__(
        self,
        *,
        module: str,
        title: str,  # for messages: "engine"
        first: msgspec.Struct,  # the first message
        accepts: Any,  # union of the message types that the child sends
        take: Callable[[Message], None],
        buried: Callable[[RuntimeError], None],
    ) -> None:
        self.pid = 0
        self.ready: Future[Any] = Future()
        self.fatal: str | None = None  # its fatal message, or why one of its messages failed
        self.death: RuntimeError | None = None
        self.is_stopping = False
        self._module = module
        self._title = title
        self._first = first
        self._accepts = accepts
        self._take = take
        self._buried = buried
        self._last_lines: deque[str] = deque(maxlen=STDERR_LINES)
        self._dead = threading.Event()
        self._started = threading.Event()
        self._start_error: Exception | None = None

    def start(self) -> None:
        """Starts the process. Raises OSError if it can't be started, OverflowError for a number of over 64 bits."""
        # A dedicated thread starts the child, because the child asks the kernel to end it together with the thread that
        # started it, and the caller's thread may belong to a pool that shrinks.
        threading.Thread(target=self._live, name=f"{self._title}-process", daemon=True).start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message from any thread. Raises OSError if the process is gone or shutting down."""
        if self.death is not None or self.is_stopping:
            raise OSError(f"the {self._title} is gone")
        self._channel.send(message)

    def death_notice(self) -> RuntimeError:
        """Returns why the last :meth:`send` failed. Waits until the process ends, soon after such a failure."""
        self._dead.wait(EXIT_GRACE_S)
        return self.death or RuntimeError(f"the {self._title} is shutting down")

    @property
    def is_healthy(self) -> bool:
        return self.death is None and self.fatal is None and not self.is_stopping

    def shutdown(self, farewell: msgspec.Struct, timeout_s: float = EXIT_GRACE_S) -> None:
        """Ends the process: sends ``farewell``, and kills it after ``timeout_s``. Idempotent."""
        self.is_stopping = True
        with suppress(OSError):
            self._channel.send(farewell)
        if not self._dead.wait(timeout_s):
            self._process.kill()
            self._dead.wait(timeout_s)

    # --- in the process thread ---

    def _live(self) -> None:
        try:
            self._process, self._channel = self._begin()
        except Exception as error:  # else the caller of start would wait for good
            self._start_error = error
            return
        finally:
            self._started.set()
        reader = threading.Thread(target=self._read, name=f"{self._title}-socket", daemon=True)
        forwarder = threading.Thread(target=self._forward, name=f"{self._title}-stderr", daemon=True)
        reader.start()
        forwarder.start()
        code = self._process.wait()
        forwarder.join(1.0)
        reader.join(EXIT_GRACE_S)
        self._channel.close()
        self._bury(code)

    def _begin(self) -> tuple[subprocess.Popen[bytes], Channel[Message]]:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[3])
        environment = without_secrets(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, "-m", self._module, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        theirs.close()
        self.pid = process.pid
        channel: Channel[Message] = Channel(ours, self._accepts)
        with suppress(OSError):  # dead already: _live reads its end of file and exit code
            channel.send(self._first)
        return process, channel

    def _forward(self) -> None:
        """Forwards the process's output to stderr, and keeps the last lines."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._last_lines.append(line.decode(errors="replace").rstrip())
                with suppress(OSError, ValueError):  # our own stderr is closed
                    sys.stderr.write(line.decode(errors="replace"))
                    sys.stderr.flush()

    def _bury(self, code: int) -> None:
        if self.is_stopping:
            self.death = RuntimeError(f"the {self._title} is shutting down")
        else:
            said = self.fatal or "; ".join(self._last_lines) or "nothing on stderr"
            self.death = RuntimeError(
                f"{self._title} process died: pid {self.pid}, exit code {code}, last words: {said}; "
                f"the log above has the rest, start the {self._title} again"
            )
        self._dead.set()
        if not self.ready.done():
            self.ready.set_exception(self.death)
        self._buried(self.death)

    # --- in the socket thread ---

    def _read(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                if isinstance(message, Progress):
                    logger.info("%s %d: %s", self._title, self.pid, message.text)
                elif isinstance(message, Fatal):
                    self.fatal = message.text
                    if message.is_usage and not self.ready.done():
                        self.ready.set_exception(UsageError(message.text))
                else:
                    self._take(message)
        except Exception as error:
            # After an error in one message no thread would read the next, so end the process instead of staying silent.
            logger.exception("%s %d: a message could not be handled", self._title, self.pid)
            self.fatal = f"a message of the {self._title} could not be handled: {type(error).__name__}: {error}"
            self._process.kill()
        # The child closes its end only when it ends. If it lingers, it holds a device that no client can reach.
        deadline = time.monotonic() + EXIT_GRACE_S
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._process.poll() is None:
            self._process.kill()
