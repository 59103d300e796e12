"""The parent's end of the engine's process: starts it, reads what it says, notices its death, ends it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from trtx.errors import UsageError
from trtx.torch_engine.channel import Channel
from trtx.torch_engine.llm_args import LlmArgs
from trtx.torch_engine.llmapi.choices import Choice
from trtx.torch_engine.llmapi.feeds import Feed
from trtx.torch_engine.llmapi.results import MediaNeeded, RequestError, RequestFailed, RequestOutput
from trtx.torch_engine.messages import (
    Abort,
    DropEmbeddings,
    EmbeddingTaken,
    Fatal,
    FromEngine,
    HandoffStats,
    Progress,
    PutEmbedding,
    Ready,
    Shutdown,
    Start,
    StepReport,
    Submit,
    Update,
)
from trtx.torch_engine.shared_tensor import SharedTensor

logger = logging.getLogger(__name__)

STDERR_LINES = 20
"""Lines of the engine's last words that a death notice carries."""
_EXIT_GRACE_S = 5.0


class EngineClient:
    """One engine process. Every open request ends: with its result, with its error, or with the process's death."""

    def __init__(self, args: LlmArgs) -> None:
        self.ready: Future[Ready] = Future()
        self.device_memory_bytes = 0
        self.handoff_stats = HandoffStats()
        self.stats = Feed(args.max_stats_len)
        self.kv_events = Feed(max(1, args.kv_cache_config.event_buffer_max_size))
        self.pid = 0
        self._args = args
        self._ids = itertools.count(1)
        self._choices: dict[int, Choice] = {}  # sequence id -> where its tokens go
        self._puts: deque[Future[None]] = deque()  # sent and not answered, in the order in which both happen
        self._put_lock = threading.Lock()
        self._last_lines: deque[str] = deque(maxlen=STDERR_LINES)
        self._fatal: str | None = None
        self._death: RuntimeError | None = None
        self._is_stopping = False
        self._dead = threading.Event()
        # A thread of its own starts the child: the child asks the kernel to end it with the thread that started it,
        # and a caller's thread may well be one of a pool that shrinks.
        self._started = threading.Event()
        self._start_error: OSError | None = None
        threading.Thread(target=self._live, name="engine-process", daemon=True).start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    # --- life and death, in the engine-process thread ---

    def _live(self) -> None:
        try:
            self._process, self._channel = self._start()
        except OSError as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        reader = threading.Thread(target=self._read, name="engine-socket", daemon=True)
        forwarder = threading.Thread(target=self._forward, name="engine-stderr", daemon=True)
        reader.start()
        forwarder.start()
        code = self._process.wait()
        forwarder.join(1.0)
        reader.join(_EXIT_GRACE_S)
        self._channel.close()
        self._bury(code)

    def _start(self) -> tuple[subprocess.Popen[bytes], Channel[FromEngine]]:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[3])
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, "-m", "trtx.torch_engine.core.process", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        theirs.close()
        self.pid = process.pid
        channel: Channel[FromEngine] = Channel(ours, FromEngine)
        with suppress(OSError):  # dead already: _live reads its end of file and its exit code
            channel.send(Start(self._args))
        return process, channel

    def _forward(self) -> None:
        """Passes the engine's own output on, and keeps its end."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._last_lines.append(line.decode(errors="replace").rstrip())
                with suppress(OSError, ValueError):  # our own stderr is closed: nobody to tell
                    sys.stderr.write(line.decode(errors="replace"))
                    sys.stderr.flush()

    def _bury(self, code: int) -> None:
        if self._is_stopping:
            self._death = RuntimeError("the engine is shutting down")
        else:
            said = self._fatal or "; ".join(list(self._last_lines)[-STDERR_LINES:]) or "nothing on stderr"
            self._death = RuntimeError(
                f"engine process died: pid {self.pid}, exit code {code}, last words: {said}; "
                "the log above has the rest, start the engine again"
            )
        if not self.ready.done():
            self.ready.set_exception(self._death)
        self._dead.set()
        with self._put_lock:
            self._fail_puts_of_the_dead()
        while self._choices:
            with suppress(KeyError):  # another thread ended it meanwhile
                _, choice = self._choices.popitem()
                _wake([(choice.output.fail(self._death), choice.output)])

    @property
    def is_healthy(self) -> bool:
        return self._death is None and self._fatal is None and not self._is_stopping

    def shutdown(self, timeout_s: float = _EXIT_GRACE_S) -> None:
        """Ends the process: asked, after ``timeout_s`` killed. Open requests end with RuntimeError. Idempotent."""
        self._is_stopping = True
        with suppress(OSError):
            self._channel.send(Shutdown())
        if not self._dead.wait(timeout_s):
            self._process.kill()
            self._dead.wait(timeout_s)

    # --- to the engine, any thread ---

    def next_id(self) -> int:
        return next(self._ids)

    def submit(self, choice: Choice, message: Submit) -> None:
        """Raises RuntimeError when the engine is gone, RequestError for what no message can hold."""
        self._choices[message.sequence_id] = choice
        try:
            if self._death is not None or self._is_stopping:
                raise OSError
            self._channel.send(message)
        except OSError:
            self._forget(message.sequence_id)
            self._dead.wait(_EXIT_GRACE_S)
            raise self._death or RuntimeError("the engine is shutting down") from None
        except (OverflowError, ValueError, TypeError, struct.error) as error:
            self._forget(message.sequence_id)
            raise RequestError(f"the request can't be sent to the engine: {error}") from error
        except BaseException:
            self._forget(message.sequence_id)
            raise

    def _forget(self, sequence_id: int) -> bool:
        """Whether it was still open."""
        choice = self._choices.pop(sequence_id, None)
        if choice is not None and choice.on_end is not None:
            choice.on_end()
        return choice is not None

    def put_embedding(self, key: bytes, tensor: SharedTensor) -> Future[None]:
        """Done once the engine has read the file: with ValueError where the model can't use it, RuntimeError where the
        engine could not take it, or died. Raises RequestError for what no message can hold."""
        answer: Future[None] = Future()
        with self._put_lock:
            self._puts.append(answer)
            try:
                self._channel.send(PutEmbedding(key, tensor))
            except OSError:
                pass  # dead: see _bury
            except (OverflowError, ValueError, TypeError, struct.error) as error:
                self._puts.pop()
                raise RequestError(f"the embedding can't be sent to the engine: {error}") from error
            self._fail_puts_of_the_dead()
        return answer

    def _fail_puts_of_the_dead(self) -> None:
        """Under ``_put_lock``."""
        while self._death is not None and self._puts:
            _settle(self._puts.popleft(), self._death)

    def drop_embeddings(self, keys: Iterable[bytes]) -> None:
        with suppress(OSError):  # dead: there are none
            self._channel.send(DropEmbeddings(list(keys)))

    def abort(self, sequence_ids: Iterable[int]) -> None:
        still_open = [sequence_id for sequence_id in sequence_ids if sequence_id in self._choices]
        if still_open:
            with suppress(OSError):  # dead: its requests end with the notice of its death
                self._channel.send(Abort(still_open))

    # --- from the engine, in the engine-socket thread ---

    def _read(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._take(message)
        except Exception as error:
            # Whatever went wrong with one message, nobody reads the next: better dead than silent.
            logger.exception("engine %d: a message could not be taken in", self.pid)
            self._fatal = f"a message of the engine could not be taken in: {type(error).__name__}: {error}"
            self._process.kill()
        # The engine closes its end only by ending; one that lingers holds a device that nobody can reach.
        deadline = time.monotonic() + _EXIT_GRACE_S
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._process.poll() is None:
            self._process.kill()

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, StepReport):
            self._take_step(message)
        elif isinstance(message, Progress):
            logger.info("engine %d: %s", self.pid, message.text)
        elif isinstance(message, Ready):
            self.device_memory_bytes = message.device_memory_bytes
            self.ready.set_result(message)
        elif isinstance(message, EmbeddingTaken):
            kind = RuntimeError if message.is_failure else ValueError
            _settle(self._puts.popleft(), None if message.error is None else kind(message.error))
        elif isinstance(message, Fatal):
            self._fatal = message.text
            if message.is_usage and not self.ready.done():
                self.ready.set_exception(UsageError(message.text))

    def _take_step(self, report: StepReport) -> None:
        if report.handoff_stats is not None:
            self.handoff_stats = report.handoff_stats
        if report.device_memory_bytes is not None:
            self.device_memory_bytes = report.device_memory_bytes
        if report.stats is not None:
            self.stats.add((report.stats,))
        if report.kv_events:
            self.kv_events.add(report.kv_events)
        wakes: list[tuple[asyncio.AbstractEventLoop | None, RequestOutput]] = []
        overrun: list[int] = []
        for update in report.updates:
            choice = self._choices.get(update.sequence_id)
            if choice is not None:  # None: ended here by a stop string, while the engine had gone on
                wakes.append((self._deliver(choice, update, overrun), choice.output))
        if overrun:
            with suppress(OSError):
                self._channel.send(Abort(overrun))
        _wake(wakes)

    def _deliver(self, choice: Choice, update: Update, overrun: list[int]) -> asyncio.AbstractEventLoop | None:
        """Hands one update on. Adds sequences that must end before the engine knows it to ``overrun``."""
        if update.error is not None:
            return self._end(choice, update.sequence_id, _error_of(update, update.error), overrun)
        is_overrun = update.finish_reason is None  # if it ends here all the same, at a stop string
        try:
            delivery = choice.delivery(update)
        except Exception as error:
            logger.exception("request %d ends with an error of its text", choice.output.request_id)
            overrun.append(update.sequence_id)
            problem = f"the text of this request could not be made: {type(error).__name__}: {str(error)[:500]}"
            return self._end(choice, update.sequence_id, RequestFailed(problem), overrun)
        if delivery is None:
            return None
        if update.finish_reason is not None:
            self._forget(update.sequence_id)
            if is_overrun:
                overrun.append(update.sequence_id)
        return choice.output.push(delivery)

    def _end(
        self, choice: Choice, ended: int, error: RequestError, overrun: list[int]
    ) -> asyncio.AbstractEventLoop | None:
        """Ends a request with an error for all of its choices, of which the engine has ended one."""
        for sequence_id in choice.siblings:
            if self._forget(sequence_id) and sequence_id != ended:
                overrun.append(sequence_id)
        return choice.output.fail(error)


def _settle(answer: Future[None], error: Exception | None) -> None:
    if not answer.set_running_or_notify_cancel():
        return  # whoever asked has gone
    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)


def _error_of(update: Update, text: str) -> RequestError:
    if update.media_needed is not None:
        return MediaNeeded(text, update.media_needed)
    return RequestFailed(text) if update.is_failure else RequestError(text)


def _wake(wakes: list[tuple[asyncio.AbstractEventLoop | None, RequestOutput]]) -> None:
    """One call a loop, however many outputs."""
    by_loop: dict[asyncio.AbstractEventLoop, list[RequestOutput]] = {}
    for loop, output in wakes:
        if loop is not None:
            by_loop.setdefault(loop, []).append(output)
    for loop, outputs in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_wake_all, outputs)


def _wake_all(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        output.wake()
