"""An engine that generates tokens by a clock: the LLM API with known latencies.

It calibrates the measurement chain, whose TTFT and ITL must come out as ``paced_ttft_ms`` and ``paced_itl_ms``, and
drives the streaming benchmark. It has no weights and no KV; its tokens are meaningless but deterministic. It uses the
torch engine's request and result classes, so the worker code on top of it is the code that serves the torch engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtx.checkpoint.facts import context_length_of, read_config
from trtx.engine.api import Engine, EngineFacts, Hints, Result
from trtx.errors import UsageError
from trtx.text import TextStream, load_decoder
from trtx.torch_engine.llmapi.choices import Choice, find_stops
from trtx.torch_engine.llmapi.completions import CompletionOutput
from trtx.torch_engine.llmapi.disaggregated import DisaggregatedParams
from trtx.torch_engine.llmapi.request_errors import RequestError, RequestFailed
from trtx.torch_engine.llmapi.results import Delivery, RequestOutput
from trtx.torch_engine.llmapi.sampling import SamplingParams, checked_sampling, resolve_sampling
from trtx.torch_engine.messages import EngineTimes, Handoff, MediaSpan, Update
from trtx.torch_engine.sampling_plan import SamplingPlan

__all__ = ["DisaggregatedParams", "PacedArgs", "PacedLLM", "RequestError", "RequestFailed", "SamplingParams"]

CATCH_UP_SECONDS = 0.05
"""How far the clock may lag behind and still keep its rate by catching up.

Steps later than this are dropped, as in a stalled engine.
"""
DISTINCT_TOKENS = 64
_OPAQUE_STATE = b"paced"  # placeholder: there is no KV to hand over
_BLOCK_SIZE = 32  # nominal: there is no KV, but routers have to agree on a block size


@dataclass(frozen=True, slots=True)
class PacedArgs:
    """Delays in milliseconds, and the request limits under TensorRT-LLM's names."""

    paced_ttft_ms: float  # from arrival to the first token; 0: no delay
    paced_itl_ms: float  # between steps; 0: steps follow each other at once
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int


@dataclass(slots=True, eq=False)
class _Running:
    """A request in progress. It gets no token before ``ready_at`` (monotonic seconds)."""

    choice: Choice
    sampling: SamplingPlan
    ready_at: float
    position: int  # position of the next token, counted over prompt and output
    left: int  # tokens still to make
    hands_off: bool  # context_only: its only token goes to a decode worker
    made: int = 0
    is_aborted: bool = False
    arrived: float = field(default_factory=time.monotonic)
    admitted: float = 0.0  # when it became one of the running requests; the same clock
    first_token: float = 0.0


class PacedLLM(Engine):
    """The LLM API driven by one clock. Each step gives one token to every request whose ``paced_ttft_ms`` has passed.

    A request that finds the engine idle restarts the clock; any other request waits for the next step, as in a real
    engine. So TTFT is exact at concurrency 1 and up to one step longer above, and ITL is always exact.
    ``generation_only`` requests continue after ``first_gen_tokens`` without delay. The records of the sampling
    parameters (``SamplingParams``) say what this engine does with each; log-probabilities are refused, because its
    tokens have no probability.
    """

    def __init__(self, model: str | Path, **llm_args: Any) -> None:
        directory = Path(model)
        self.args = _resolve(directory, llm_args)
        self._tokenizer = load_decoder(directory)
        self._token_ids = _ordinary_token_ids(directory)
        self._request_ids = itertools.count(1)
        self._arrivals: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._changed = threading.Condition()
        self._is_stopped = False
        self._iterations = 0
        self._thread = threading.Thread(target=self._run, name="paced-engine", daemon=True)
        self._thread.start()
        self.facts = EngineFacts(
            context_length=self.args.max_seq_len,
            block_size=_BLOCK_SIZE,
            max_batch_size=self.args.max_batch_size,
            max_num_tokens=self.args.max_num_tokens,
        )

    def generate_async(
        self,
        inputs: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        streaming: bool = False,
        disaggregated_params: DisaggregatedParams | None = None,
        cache_salt: str | None = None,  # no effect, like the next two parameters
        trace_headers: Mapping[str, str] | None = None,
        hints: Hints | None = None,
        media: Sequence[MediaSpan] = (),
        routing_token_ids: Sequence[int] | None = None,  # no effect: this engine has no KV events
    ) -> RequestOutput:
        """Starts a request and returns at once.

        Raises ValueError and RequestError for requests that this engine can't answer.
        """
        if media:
            raise RequestError("the request has media, which the paced engine does not support; send text only")
        sampling = checked_sampling(sampling_params, "paced")
        prompt = list(inputs)[-(sampling.truncate_prompt_tokens or 0) :]
        room = self.args.max_seq_len - len(prompt)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; expected less than max_seq_len {room + len(prompt)}"
            )
        kind = disaggregated_params.request_type if disaggregated_params is not None else None
        stops = find_stops(sampling, self._tokenizer) if kind != "context_only" else None
        text = TextStream(self._tokenizer, skip_special_tokens=sampling.skip_special_tokens)
        output = RequestOutput(
            next(self._request_ids),
            prompt=None,
            prompt_token_ids=prompt,
            num_choices=1,
            streaming=streaming,
            on_abort=lambda: self._abort(running),
            text_streams=[text] if sampling.detokenize and stops is None else None,
        )
        now = time.monotonic()
        running = _Running(
            Choice(0, output, [output.request_id], stops),
            resolve_sampling(sampling),
            ready_at=now + self.args.paced_ttft_ms / 1000,
            position=len(prompt),
            left=1 if kind == "context_only" else min(sampling.max_tokens or room, room),
            hands_off=kind == "context_only",
        )
        if kind == "generation_only" and disaggregated_params is not None:
            running.ready_at = now
            for token_id in disaggregated_params.first_gen_tokens or ():
                self._give(running, token_id)
        if running.left:
            with self._changed:
                self._arrivals.append(running)
                self._changed.notify()
        return output

    def pause(self, result: Result, seconds: float) -> Awaitable[None]:
        assert isinstance(result, RequestOutput)
        return result.pause(seconds)

    def shutdown(self) -> None:
        """Stops the clock; open requests end with RuntimeError. Idempotent."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        self._thread.join()

    # --- stats and health ---

    def times(self, output: CompletionOutput) -> EngineTimes | None:
        return output.engine_times

    async def get_stats_async(self, timeout: float) -> AsyncIterator[dict[str, Any]]:
        """Yields one row with the current state; ``timeout`` has no effect."""
        yield {
            "iter": self._iterations,
            "iterLatencyMS": self.args.paced_itl_ms,
            "numActiveRequests": len(self._running),
            "numQueuedRequests": len(self._arrivals),
            "maxNumActiveRequests": self.args.max_batch_size,
        }

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # --- the clock ---

    def _run(self) -> None:
        step_seconds = self.args.paced_itl_ms / 1000
        next_step = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopped or self._arrivals or self._running)
                if self._is_stopped:
                    break
                while self._arrivals and len(self._running) < self.args.max_batch_size:
                    self._running.append(self._arrivals.popleft())
                    self._running[-1].admitted = time.monotonic()
                now = time.monotonic()
                earliest = min(0.0 if r.is_aborted else r.ready_at for r in self._running)
                if earliest > next_step:
                    next_step = earliest  # no request was due earlier: restart the clock
                elif next_step < now - CATCH_UP_SECONDS:
                    next_step = now
                if earliest and next_step > now:
                    self._changed.wait(next_step - now)
                    continue
            self._step(next_step)
            if not self._running:
                next_step = 0.0
            elif step_seconds:
                next_step += step_seconds
            else:
                next_step = time.monotonic()
                time.sleep(0)  # without a delay, the clock must still release the GIL to the consumers
        self._end_all()

    def _step(self, at: float) -> None:
        """Gives one token to each request that is due, and wakes all consumers of an event loop with one call."""
        self._iterations += 1
        still_running: list[_Running] = []
        to_wake: dict[asyncio.AbstractEventLoop, list[RequestOutput]] = {}
        for running in self._running:
            loop = None
            try:
                if running.is_aborted:
                    running.left = 0
                    loop = running.choice.output.push(Delivery(0, Update(0, [], "cancelled")))
                elif running.ready_at <= at:
                    loop = self._give(running, self._token_ids[running.position % len(self._token_ids)])
            except Exception as error:  # an error in this request's text must not stop the other requests
                running.left = 0
                loop = running.choice.output.fail(RequestFailed(f"the request failed: {type(error).__name__}: {error}"))
            if running.left:
                still_running.append(running)
            if loop is not None:
                to_wake.setdefault(loop, []).append(running.choice.output)
        self._running = still_running
        _wake(to_wake)

    def _give(self, running: _Running, token_id: int) -> asyncio.AbstractEventLoop | None:
        """Delivers one token. Returns the event loop of a waiting consumer, or None."""
        may_end, plan = running.made >= running.sampling.min_tokens, running.sampling
        running.position += 1
        running.left -= 1
        running.made += 1
        update = Update(0, [token_id], None if running.left else "length")
        if may_end and token_id in plan.end_ids:
            update.finish_reason = "stop"
        elif may_end and token_id in plan.stop_ids:
            update.finish_reason, update.stop_reason = "stop", token_id
            update.token_ids = [token_id] if plan.keeps_stop_id else []
        if running.admitted and (not running.first_token or update.finish_reason is not None):
            update.times = _times(running)
        if running.hands_off:
            update.handoff = Handoff("context_only", [token_id], opaque_state=_OPAQUE_STATE)
        delivery = running.choice.delivery(update)
        if delivery is None:
            return None
        if update.finish_reason is not None:
            running.left = 0
        return running.choice.output.push(delivery)

    def _abort(self, running: _Running) -> None:
        with self._changed:
            running.is_aborted = True
            self._changed.notify()

    def _end_all(self) -> None:
        to_wake: dict[asyncio.AbstractEventLoop, list[RequestOutput]] = {}
        for running in (*self._running, *self._arrivals):
            loop = running.choice.output.fail(RuntimeError("the paced engine was shut down"))
            if loop is not None:
                to_wake.setdefault(loop, []).append(running.choice.output)
        self._running = []
        _wake(to_wake)


def _times(running: _Running) -> EngineTimes:
    now = time.monotonic()
    running.first_token = running.first_token or now
    return EngineTimes(
        arrived_s=running.arrived,
        queue_s=running.admitted - running.arrived,
        prefill_s=running.first_token - running.admitted,
        decode_s=now - running.first_token if now > running.first_token else None,
    )


def _wake(outputs_by_loop: dict[asyncio.AbstractEventLoop, list[RequestOutput]]) -> None:
    for loop, outputs in outputs_by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed: no consumer is left to wake
            loop.call_soon_threadsafe(_wake_all, outputs)


def _wake_all(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        output.wake()


def _resolve(directory: Path, llm_args: Mapping[str, Any]) -> PacedArgs:
    """Reads the arguments that this engine uses. A plan reports all others as ignored (``trtx.config.engine_uses``)."""
    for name in ("paced_ttft_ms", "paced_itl_ms"):
        value = llm_args.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 3_600_000:
            raise UsageError(f"{name} is {value!r}, expected milliseconds from 0 to an hour")
    max_seq_len = llm_args.get("max_seq_len") or context_length_of(read_config(directory))
    if max_seq_len is None:
        raise UsageError(f"{directory / 'config.json'} has no max_position_embeddings; set max_seq_len")
    return PacedArgs(
        paced_ttft_ms=float(llm_args.get("paced_ttft_ms", 0)),
        paced_itl_ms=float(llm_args.get("paced_itl_ms", 0)),
        max_seq_len=max_seq_len,
        max_batch_size=llm_args.get("max_batch_size") or 2048,
        max_num_tokens=llm_args.get("max_num_tokens") or 8192,
    )


def _ordinary_token_ids(directory: Path) -> list[int]:
    """Ids of tokens that consist of ASCII letters only: each is complete text, so a detokenizer returns it at once."""
    tokenizer: Any = load_decoder(directory)
    vocabulary = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    letters = [token_id for token_id, token in vocabulary if token.isascii() and token.isalpha()][:DISTINCT_TOKENS]
    if not letters:
        raise UsageError("the tokenizer has no token of ASCII letters; the paced engine needs one to write with")
    return letters
