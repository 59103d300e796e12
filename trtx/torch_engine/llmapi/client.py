"""The open requests of one engine process, and how they end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
import sys
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress

from trtx.ipc.child_messages import Shutdown
from trtx.ipc.shared_tensor import SharedTensor
from trtx.torch_engine.embeddings import EmbeddingGone, EmbeddingUnreachable
from trtx.torch_engine.llm_args import LlmArgs
from trtx.torch_engine.llmapi.child import EXIT_GRACE_S, ChildProcess
from trtx.torch_engine.llmapi.choices import Choice
from trtx.torch_engine.llmapi.feeds import Feed
from trtx.torch_engine.llmapi.request_errors import MediaNeeded, RequestError, RequestFailed
from trtx.torch_engine.llmapi.results import RequestOutput
from trtx.torch_engine.messages import (
    Abort,
    DropEmbeddings,
    EmbeddingTaken,
    FromEngine,
    HandoffStats,
    MemoryDone,
    MemoryRequest,
    MemoryTag,
    PutEmbedding,
    Ready,
    Start,
    StepReport,
    Submit,
    Update,
)

logger = logging.getLogger(__name__)

_LOST: dict[str, type[Exception]] = {"gone": EmbeddingGone, "unreachable": EmbeddingUnreachable}


class EngineClient:
    """One engine process. Every open request ends: with its result, with its error, or with the process's death."""

    def __init__(self, args: LlmArgs, batched_processor: bytes | None = None) -> None:
        """``batched_processor``: the pickled argument ``batched_logits_processor`` of ``LLM``."""
        self.device_memory_bytes = 0
        self.handoff_stats = HandoffStats()
        self.stats = Feed(args.max_stats_len)
        self.kv_events = Feed(max(1, args.kv_cache_config.event_buffer_max_size))
        self._ids = itertools.count(1)
        self._choices: dict[int, Choice] = {}  # sequence id -> destination of its tokens
        self._puts: deque[Future[None]] = deque()  # sent but not answered; answers come in the same order
        self._put_lock = threading.Lock()
        self.parked: tuple[MemoryTag, ...] = ()  # released memory
        self._changes: deque[Future[None]] = deque()  # of memory: sent but not answered; answers come in the same order
        self._child: ChildProcess[FromEngine] = ChildProcess(
            module="trtx.torch_engine.core.process",
            title="engine",
            first=Start(args, batched_processor, [path for path in sys.path if path]),
            accepts=FromEngine,
            take=self._take,
            buried=self._bury,
        )
        self.ready: Future[Ready] = self._child.ready
        self._child.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_healthy(self) -> bool:
        return self._child.is_healthy

    def shutdown(self, timeout_s: float = EXIT_GRACE_S) -> None:
        """Ends the process: asks first, kills it after ``timeout_s``.

        Open requests end with RuntimeError. Idempotent.
        """
        self._child.shutdown(Shutdown(), timeout_s)

    # --- to the engine, any thread ---

    def next_id(self) -> int:
        return next(self._ids)

    def submit(self, choice: Choice, message: Submit) -> None:
        """Sends a sequence.

        Raises RuntimeError if the engine is gone, RequestFailed if it sleeps, RequestError for values that can't be
        encoded.
        """
        if self.parked:
            raise RequestFailed(f"the engine is asleep: {', '.join(self.parked)} released; wake it first")
        self._choices[message.sequence_id] = choice
        try:
            self._child.send(message)
        except OSError:
            self._forget(message.sequence_id)
            raise self._child.death_notice() from None
        except (OverflowError, ValueError, TypeError, struct.error) as error:
            self._forget(message.sequence_id)
            raise RequestError(f"the request can't be sent to the engine: {error}") from error
        except BaseException:
            self._forget(message.sequence_id)
            raise

    def _forget(self, sequence_id: int) -> bool:
        """Removes a choice; returns whether it was still open."""
        choice = self._choices.pop(sequence_id, None)
        if choice is not None and choice.on_end is not None:
            choice.on_end()
        return choice is not None

    def put_embedding(self, key: bytes, tensor: SharedTensor) -> Future[None]:
        """Sends an embedding. The future is done once the engine has read the file.

        It fails with ValueError if the model can't use the embedding, RuntimeError if the engine failed to read it or
        died, EmbeddingGone or EmbeddingUnreachable if its rows stayed on an encoder's device and can't be read from
        there. Raises RequestError for values that can't be encoded.
        """
        answer: Future[None] = Future()
        with self._put_lock:
            self._puts.append(answer)
            try:
                self._child.send(PutEmbedding(key, tensor))
            except OSError:
                pass  # dead: see _bury
            except (OverflowError, ValueError, TypeError, struct.error) as error:
                self._puts.pop()
                raise RequestError(f"the embedding can't be sent to the engine: {error}") from error
            self._fail_puts_of_the_dead()
        return answer

    def _fail_puts_of_the_dead(self) -> None:
        """Fails all pending puts and memory requests of a dead engine. Call it with ``_put_lock`` held."""
        death = self._child.death
        for pending in (self._puts, self._changes):
            while death is not None and pending:
                _settle(pending.popleft(), death)

    def change_memory(self, request: MemoryRequest) -> Future[None]:
        """Sends a request about the engine's memory.

        The future fails with RequestError if the engine did nothing, RuntimeError if it died.
        """
        answer: Future[None] = Future()
        with self._put_lock:
            self._changes.append(answer)
            with suppress(OSError):  # dead: see _bury
                self._child.send(request)
            self._fail_puts_of_the_dead()
        return answer

    def drop_embeddings(self, keys: Iterable[bytes]) -> None:
        with suppress(OSError):  # dead: it has no embeddings
            self._child.send(DropEmbeddings(list(keys)))

    def abort(self, sequence_ids: Iterable[int]) -> None:
        still_open = [sequence_id for sequence_id in sequence_ids if sequence_id in self._choices]
        if still_open:
            with suppress(OSError):  # dead: its requests end with the death notice
                self._child.send(Abort(still_open))

    # --- from the engine, in the threads of the child ---

    def _bury(self, death: RuntimeError) -> None:
        with self._put_lock:
            self._fail_puts_of_the_dead()
        while self._choices:
            with suppress(KeyError):  # another thread ended it meanwhile
                _, choice = self._choices.popitem()
                _wake([(choice.output.fail(death), choice.output)])

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, StepReport):
            self._take_step(message)
        elif isinstance(message, Ready):
            self.device_memory_bytes = message.device_memory_bytes
            self.ready.set_result(message)
        elif isinstance(message, MemoryDone):
            self.parked, self.device_memory_bytes = tuple(message.parked), message.device_memory_bytes
            _settle(self._changes.popleft(), None if message.error is None else RequestError(message.error))
        elif isinstance(message, EmbeddingTaken):
            kind: type[Exception] = RuntimeError if message.is_failure else ValueError
            kind = _LOST.get(message.lost, kind)
            _settle(self._puts.popleft(), None if message.error is None else kind(message.error))

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
            if choice is not None:  # None: a stop string ended it here, while the engine went on
                wakes.append((self._deliver(choice, update, overrun), choice.output))
        if overrun:
            with suppress(OSError):
                self._child.send(Abort(overrun))
        _wake(wakes)

    def _deliver(self, choice: Choice, update: Update, overrun: list[int]) -> asyncio.AbstractEventLoop | None:
        """Delivers one update.

        Appends to ``overrun`` the sequences that the engine must abort because they end here.
        """
        if update.error is not None:
            return self._end(choice, update.sequence_id, _error_of(update, update.error), overrun)
        is_overrun = update.finish_reason is None  # applies if a stop string ends it here
        try:
            delivery = choice.delivery(update)
        except RequestError as error:
            overrun.append(update.sequence_id)
            return self._end(choice, update.sequence_id, error, overrun)
        except Exception as error:
            logger.exception("request %d ends because its text could not be made", choice.output.request_id)
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
        """Ends a request with an error for all choices; the engine has already ended sequence ``ended``."""
        for sequence_id in choice.siblings:
            if self._forget(sequence_id) and sequence_id != ended:
                overrun.append(sequence_id)
        return choice.output.fail(error)


def _settle(answer: Future[None], error: Exception | None) -> None:
    if not answer.set_running_or_notify_cancel():
        return  # the caller cancelled the future
    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)


def _error_of(update: Update, text: str) -> RequestError:
    if update.media_needed is not None:
        return MediaNeeded(text, update.media_needed)
    return RequestFailed(text) if update.is_failure else RequestError(text)


def _wake(wakes: list[tuple[asyncio.AbstractEventLoop | None, RequestOutput]]) -> None:
    """Wakes the waiting outputs with one call for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[RequestOutput]] = {}
    for loop, output in wakes:
        if loop is not None:
            by_loop.setdefault(loop, []).append(output)
    for loop, outputs in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: no consumer waits
            loop.call_soon_threadsafe(_wake_all, outputs)


def _wake_all(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        output.wake()
