"""What the caller of ``generate_async`` gets: TensorRT-LLM's ``RequestOutput``."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import msgspec

from trtx.text import TextStream
from trtx.torch_engine.llmapi.completions import CompletionOutput, KvCacheMetrics, RequestPerfMetrics, likeliest
from trtx.torch_engine.llmapi.disaggregated import DisaggregatedParams
from trtx.torch_engine.messages import Update


class Delivery(msgspec.Struct, frozen=True):
    """One choice's update for its consumer. ``text`` is set if the search for stop strings has detokenized it."""

    choice: int
    update: Update
    text: str | None = None


def end_wait(waiter: asyncio.Future[None]) -> None:
    """Ends a wait. Call it on the waiter's loop; the waiter may have gone."""
    if not waiter.done():
        waiter.set_result(None)


class RequestOutput:
    """A running request: await it, iterate over it (``async for`` or ``for``), or block on ``result``.

    Iterators yield the object itself. One thread pushes, one consumer reads. Values that the consumer sees change only
    when it takes the next step: updates wait in ``_arrived`` until then and are applied all at once, so a slow consumer
    gets fewer, larger steps.
    """

    def __init__(
        self,
        request_id: int,
        *,
        prompt: str | None,
        prompt_token_ids: list[int],
        num_choices: int,
        num_returned: int | None = None,
        keeps_logprobs: bool = True,
        streaming: bool,
        on_abort: Callable[[], None],
        text_streams: list[TextStream] | None,
    ) -> None:
        """``num_returned``: number of choices in ``outputs``, None for all. The others are dropped at the end.

        ``keeps_logprobs``: False if the logprobs only serve to select the choices.
        """
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self._choices = [CompletionOutput(index) for index in range(num_choices)]
        self.outputs = self._choices[:num_returned]
        self._keeps_logprobs = keeps_logprobs
        self.context_logits = None
        self.finished = False
        self.metrics_dict: dict[str, Any] = {}
        self._streaming = streaming
        self._on_abort = on_abort
        self._text_streams = text_streams
        self._is_aborted = False
        self._is_over = False  # the consumer has received the last step
        self._arrived: deque[Delivery] = deque()
        self._error: BaseException | None = None
        self._open_choices = num_choices  # counted by the pushing thread
        self._ended = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_pausing = False
        self._news: threading.Event | None = None  # for a consumer that iterates without a loop

    @property
    def disaggregated_params(self) -> DisaggregatedParams | None:
        return self.outputs[0].disaggregated_params

    def abort(self) -> None:
        """Asks the engine to end the request; the stream then ends with finish reason ``cancelled``."""
        if not self._is_aborted:
            self._is_aborted = True
            self._on_abort()

    def aborted(self) -> bool:
        return self._is_aborted

    # --- the pushing thread ---

    def push(self, delivery: Delivery) -> asyncio.AbstractEventLoop | None:
        """Adds an update. Returns the event loop of a waiting consumer that should wake up, or None."""
        self._arrived.append(delivery)
        if delivery.update.finish_reason is not None:
            self._open_choices -= 1
            if self._open_choices == 0:
                self._ended.set()
        if self._news is not None:
            self._news.set()
        is_wanted = self._ended.is_set() or (self._streaming and not self._is_pausing)
        return self._loop if is_wanted and self._waiter is not None else None

    def fail(self, error: BaseException) -> asyncio.AbstractEventLoop | None:
        """Ends the request with an exception, after all earlier updates."""
        self._error = error
        self._ended.set()
        if self._news is not None:
            self._news.set()
        return self._loop if self._waiter is not None else None

    def wake(self) -> None:
        """Wakes the waiting consumer. Call it on the waiter's loop."""
        if self._waiter is not None:
            end_wait(self._waiter)

    # --- the consumer ---

    def _look(self) -> bool:
        """Applies all updates that have arrived; returns whether there were any. Raises the request's error."""
        arrived = self._arrived
        if not arrived:
            if self._error is not None:
                self._is_over = True
                raise self._error
            return False
        for output in self._choices:
            output.mark_seen()
        while arrived:
            self._apply(arrived.popleft())
        return True

    def _apply(self, delivery: Delivery) -> None:
        update, output = delivery.update, self._choices[delivery.choice]
        output.token_ids += update.token_ids
        if update.logprobs:
            if self._keeps_logprobs:
                output.logprobs += update.logprobs
            chosen = zip(update.logprobs, update.token_ids, strict=True)
            gained = sum(logprobs[token_id].logprob for logprobs, token_id in chosen)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + gained
        if update.prompt_logprobs:
            output.prompt_logprobs += update.prompt_logprobs
        if update.reused_blocks:
            output.request_perf_metrics = RequestPerfMetrics(KvCacheMetrics(update.reused_blocks))
        if update.transfer is not None:
            output.kv_transfer = update.transfer
        if update.times is not None:
            output.engine_times = update.times
        if update.handoff is not None:
            output.disaggregated_params = DisaggregatedParams.from_handoff(update.handoff)
        if delivery.text is not None:
            output.text += delivery.text
        elif self._text_streams is not None:
            stream = self._text_streams[delivery.choice]
            output.text += stream.feed(update.token_ids)
            if update.finish_reason is not None:
                output.text += stream.finish()
        if update.finish_reason is not None:
            output.finish_reason = update.finish_reason
            output.stop_reason = update.stop_reason
            self.finished = all(output.finish_reason is not None for output in self._choices)
            if self.finished and len(self.outputs) < len(self._choices):
                self.outputs = likeliest(self._choices, len(self.outputs))

    def _has_step(self) -> bool:
        """Applies the next step for an iterator, if there is one. Raises the request's error."""
        if not (self._streaming or self._ended.is_set()) or not self._look():
            return False
        self._is_over = self.finished
        return self._streaming or self.finished

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        while not self._has_step():
            try:
                await self._news_to_come()
            finally:
                self._waiter = None
        return self

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        """Blocks for the next step. Call it in any thread except that of the event loop that consumes this request."""
        if self._is_over:
            raise StopIteration
        if self._news is None:
            self._news = threading.Event()
        while True:
            # The pushing thread appends before it sets the event, so an update that arrives after this check wakes us.
            self._news.clear()
            if self._has_step():
                return self
            self._news.wait()

    def _news_to_come(self) -> asyncio.Future[None]:
        """Returns a future that is done once there is an update.

        Not a coroutine, which would cost time for each token.
        """
        self._loop = asyncio.get_running_loop()
        self._waiter = waiter = self._loop.create_future()
        # The pushing thread appends before it looks for a waiter: an update that it did not signal is visible here.
        if self._ended.is_set() or (self._streaming and self._arrived):
            waiter.set_result(None)
        return waiter

    async def pause(self, seconds: float) -> None:
        """Lets updates accumulate into one step: returns after ``seconds``, or earlier if the request ends.

        Call it on the iterating consumer's event loop, between two steps.
        """
        loop = self._loop = asyncio.get_running_loop()
        self._is_pausing = True
        self._waiter = waiter = loop.create_future()
        # Never cancelled: a consumer may drop a pausing request in a thread without an event loop.
        loop.call_later(seconds, end_wait, waiter)
        try:
            # The pushing thread sets the event before it looks for a waiter: an end that it did not signal is visible
            # here.
            if not self._ended.is_set():
                await waiter
        finally:
            self._waiter = None
            self._is_pausing = False

    async def aresult(self) -> RequestOutput:
        """Waits for the end. Raises RequestError if this request failed, RuntimeError if the engine died."""
        async for _ in self:
            pass
        return self

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Blocks until the end.

        Raises TimeoutError. Call it in any thread except that of the event loop that consumes this.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"request {self.request_id} did not finish within {timeout} s")
        while not self.finished:
            self._look()
        self._is_over = True
        return self

    def __repr__(self) -> str:
        names = ("request_id", "prompt", "prompt_token_ids", "outputs", "finished")
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"
