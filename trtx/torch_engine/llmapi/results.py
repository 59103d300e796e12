"""What a caller of ``generate_async`` holds: TensorRT-LLM's ``RequestOutput`` and the values in it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from trtx.text import TextStream
from trtx.torch_engine.llmapi.values import shown
from trtx.torch_engine.messages import Handoff, KvTransfer, Logprob, MediaSpan, Update


class RequestError(RuntimeError):
    """One request cannot be served as it is; every other one is unharmed. Its text is for the client."""


class RequestFailed(RequestError):
    """One request could not be answered, and there is nothing wrong with it: the model's numbers are none, or the
    engine met an error of its own in it. Every other one is unharmed."""


class MediaNeeded(RequestFailed):
    """The prompt has to be computed here, of which the engine has no embeddings: they never came, or were dropped.

    Put those under ``keys`` and submit it again: as it was, or, where tokens of it have been seen, as a
    ``generation_only`` request whose ``first_gen_tokens`` are all of them, and which has no ``opaque_state``: a peer's
    KV has been read, or is not to be had.
    """

    def __init__(self, text: str, keys: Sequence[bytes]) -> None:
        super().__init__(text)
        self.keys = tuple(keys)


def typed(kind: Any, value: Any, name: str) -> Any:
    """``value`` as a message to the engine holds it. Raises RequestError for another type anywhere in it: refused here,
    where it harms nobody else."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{name} holds a value of the wrong type: {error}") from error


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    """TensorRT-LLM's: what travels from a prefill engine to a decode engine. The torch engine reads the first six, and
    ``media``, which is its own: the spans of a prompt's media, so that decode needs no more of them."""

    request_type: Literal["context_only", "generation_only", "context_and_generation"] | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[dict[int, Logprob]] | None = None
    ctx_request_id: int | None = None
    disagg_request_id: int | None = None
    opaque_state: bytes | None = None
    first_gen_logits: Any = None
    draft_tokens: list[int] | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | list[str] | None = None
    schedule_style: int | None = None
    ctx_usage: Any = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None
    multimodal_item_runs: Any = None
    mrope_position_ids_handle: dict[str, Any] | None = None
    mrope_position_deltas_handle: dict[str, Any] | None = None
    media: list[MediaSpan] | None = None

    def __post_init__(self) -> None:
        known = (None, "context_only", "generation_only", "context_and_generation")
        if self.request_type not in known:
            raise ValueError(
                f"request_type is {shown(self.request_type)}; expected one of {', '.join(map(str, known[1:]))}"
            )

    @classmethod
    def from_handoff(cls, handoff: Handoff) -> DisaggregatedParams:
        return cls(**msgspec.structs.asdict(handoff))

    def handoff(self) -> Handoff | None:
        """None for a whole request, which an engine serves without a peer. Raises ValueError as the constructor."""
        self.__post_init__()
        if self.request_type is None or self.request_type == "context_and_generation":
            return None
        values = [getattr(self, name) for name in Handoff.__struct_fields__]
        handoff: Handoff = typed(Handoff, values, "disaggregated_params")
        return handoff


@dataclass(frozen=True, slots=True)
class KvCacheMetrics:
    num_reused_blocks: int


@dataclass(frozen=True, slots=True)
class RequestPerfMetrics:
    kv_cache_metrics: KvCacheMetrics


@dataclass(slots=True, eq=False)
class CompletionOutput:
    """One choice. ``token_ids``, ``text`` and ``logprobs`` are cumulative; the ``_diff``s are since the last look."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None  # stop, length, cancelled, timeout
    stop_reason: int | str | None = None
    disaggregated_params: DisaggregatedParams | None = None
    request_perf_metrics: RequestPerfMetrics | None = None
    kv_transfer: KvTransfer | None = None  # of a generation_only request, once it has computed a token
    generation_logits: None = None
    _tokens_seen: int = 0
    _text_seen: int = 0
    _logprobs_seen: int = 0

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._tokens_seen :]

    @property
    def text_diff(self) -> str:
        return self.text[self._text_seen :]

    @property
    def logprobs_diff(self) -> list[dict[int, Logprob]]:
        return self.logprobs[self._logprobs_seen :]

    def _mark_seen(self) -> None:
        self._tokens_seen, self._text_seen = len(self.token_ids), len(self.text)
        self._logprobs_seen = len(self.logprobs)


class Delivery(msgspec.Struct, frozen=True):
    """One choice's update, for its consumer. ``text`` is set where stop strings had to be looked for already."""

    choice: int
    update: Update
    text: str | None = None


def end_wait(waiter: asyncio.Future[None]) -> None:
    """On its loop; nobody may wait any more."""
    if not waiter.done():
        waiter.set_result(None)


class RequestOutput:
    """A request under way: await it, iterate over it (``async for`` or ``for``), or block on ``result``. Yields itself.

    One thread pushes, one consumer looks. Nothing that the consumer sees changes between two looks: what arrives
    meanwhile waits in ``_arrived`` and is taken in all at once, so a slow consumer gets fewer, larger steps.
    """

    def __init__(
        self,
        request_id: int,
        *,
        prompt: str | None,
        prompt_token_ids: list[int],
        num_choices: int,
        streaming: bool,
        on_abort: Callable[[], None],
        text_streams: list[TextStream] | None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.outputs = [CompletionOutput(index) for index in range(num_choices)]
        self.context_logits = None
        self.finished = False
        self.metrics_dict: dict[str, Any] = {}
        self._streaming = streaming
        self._on_abort = on_abort
        self._text_streams = text_streams
        self._is_aborted = False
        self._is_over = False  # the consumer was given the last step
        self._arrived: deque[Delivery] = deque()
        self._error: BaseException | None = None
        self._open_choices = num_choices  # the pushing thread's count
        self._ended = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_pausing = False
        self._news: threading.Event | None = None  # of a consumer that iterates without a loop

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
        """Adds what is new. Returns the loop on which somebody waits for it, if anybody does."""
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
        """Ends the request with an exception, after what was pushed before it."""
        self._error = error
        self._ended.set()
        if self._news is not None:
            self._news.set()
        return self._loop if self._waiter is not None else None

    def wake(self) -> None:
        """On the waiter's loop."""
        if self._waiter is not None:
            end_wait(self._waiter)

    # --- the consumer ---

    def _look(self) -> bool:
        """Takes in everything that arrived. Returns whether anything did. Raises the request's error."""
        arrived = self._arrived
        if not arrived:
            if self._error is not None:
                self._is_over = True
                raise self._error
            return False
        for output in self.outputs:
            output._mark_seen()
        while arrived:
            self._apply(arrived.popleft())
        return True

    def _apply(self, delivery: Delivery) -> None:
        update, output = delivery.update, self.outputs[delivery.choice]
        output.token_ids += update.token_ids
        if update.logprobs:
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
            self.finished = all(output.finish_reason is not None for output in self.outputs)

    def _has_step(self) -> bool:
        """Takes in the next step for an iterator, if there is one. Raises the request's error."""
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
        """Blocks for the next step, from any thread but the one whose event loop consumes it."""
        if self._is_over:
            raise StopIteration
        if self._news is None:
            self._news = threading.Event()
        while True:
            # The pushing thread appends before it sets the event: whatever comes after this look, wakes us.
            self._news.clear()
            if self._has_step():
                return self
            self._news.wait()

    def _news_to_come(self) -> asyncio.Future[None]:
        """Done once there is something to look at. No coroutine: it would be paid at each token."""
        self._loop = asyncio.get_running_loop()
        self._waiter = waiter = self._loop.create_future()
        # The pushing thread appends before it looks for a waiter: whatever it did not see here, we see now.
        if self._ended.is_set() or (self._streaming and self._arrived):
            waiter.set_result(None)
        return waiter

    async def pause(self, seconds: float) -> None:
        """Lets steps add up to one: returns after ``seconds``, or before, once the request has ended. On the loop of
        whoever iterates, between two steps."""
        loop = self._loop = asyncio.get_running_loop()
        self._is_pausing = True
        self._waiter = waiter = loop.create_future()
        # Never cancelled: whoever drops a request that pauses may do so in a thread that runs no loop.
        loop.call_later(seconds, end_wait, waiter)
        try:
            # The pushing thread sets it before it looks for a waiter: an end that it did not see here, we see now.
            if not self._ended.is_set():
                await waiter
        finally:
            self._waiter = None
            self._is_pausing = False

    async def aresult(self) -> RequestOutput:
        """Waits for the end. Raises RequestError where this request ended with an error, RuntimeError when the engine
        died."""
        async for _ in self:
            pass
        return self

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Blocks for the end, from any thread but the one whose event loop consumes it. Raises TimeoutError."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"request {self.request_id} did not finish within {timeout} s")
        while not self.finished:
            self._look()
        self._is_over = True
        return self

    def __repr__(self) -> str:
        names = ("request_id", "prompt", "prompt_token_ids", "outputs", "finished")
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"
