"""Measures where one request spends its time on a worker; the worker writes the result when the request has ended."""

from __future__ import annotations

import time

import msgspec

from trtx.engine.api import EngineTimes


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One ended request. Times are in seconds, and an unknown value is absent. ``trtx.bench.stages`` reads it.

    ``submitted_s``, ``token_s``, ``first_chunk_s`` and ``last_chunk_s`` count from ``arrived_ns``. The times of the
    engine are those of :class:`trtx.engine.api.EngineTimes`, but the queue begins when the worker submits the request:
    an engine takes new requests between two steps.
    """

    id: str  # Dynamo's id of the request: the client's x-dynamo-request-id if that is a UUID, not its X-Request-ID
    worker: str
    role: str
    outcome: str
    arrived_ns: int  # ns since 1970
    ended_s: float
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int | None = None
    chunks: int | None = None
    media_s: float | None = None  # loading and encoding the request's images
    submitted_s: float | None = None
    first_chunk_s: float | None = None
    last_chunk_s: float | None = None
    token_s: float | None = None  # the engine had its first token; absent if the engine reads another clock
    held_s: float | None = None  # between the first and the last chunk: Dynamo had not yet asked for the next one
    rested_s: float | None = None  # pauses of the stream (``pacing``)
    queue_s: float | None = None
    prefill_s: float | None = None
    read_s: float | None = None
    first_step_s: float | None = None
    decode_s: float | None = None
    prefill_wait_s: float | None = None
    device_wait_s: float | None = None


class StageClock:
    """Records when a request passes from one stage to the next. Costs two additions per chunk."""

    __slots__ = (
        "_arrived",
        "_held",
        "_last_chunk",
        "_media",
        "_rested",
        "_submitted",
        "arrived_ns",
        "cached_tokens",
        "chunks",
        "engine",
        "first_chunk",
        "prompt_tokens",
        "request_id",
        "tokens",
        "trace_headers",
    )

    def __init__(self, request_id: str, asked_ns: int, trace_headers: dict[str, str] | None) -> None:
        """``asked_ns``: when the request arrived, on the clock of ``time.monotonic_ns``."""
        self.request_id = request_id
        self.trace_headers = trace_headers
        self._arrived = asked_ns / 1e9
        self.arrived_ns = time.time_ns() - (time.monotonic_ns() - asked_ns)
        self._media = self._submitted = self.first_chunk = self._last_chunk = self._held = self._rested = 0.0
        self.chunks = self.tokens = 0
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.engine: EngineTimes | None = None

    def loaded_media(self, seconds: float) -> None:
        self._media += seconds

    def submitted(self, prompt_tokens: int) -> None:
        """Records that the request was submitted to the engine. Only the first call counts."""
        self._submitted = self._submitted or time.monotonic()
        self.prompt_tokens = prompt_tokens

    def passed_on(self, now: float, tokens: int) -> None:
        """Records a chunk of ``tokens`` tokens. ``now``: on the clock of ``time.monotonic``."""
        self.first_chunk = self.first_chunk or now
        self._last_chunk = now
        self.chunks += 1
        self.tokens += tokens

    def held(self, seconds: float, rested: float) -> None:
        """Records how long the last chunk waited for the frontend, and the pause of the stream after it, in seconds."""
        self._held += seconds
        self._rested += rested

    def row(self, worker: str, role: str, outcome: str) -> EndedRequest:
        """The row of the request, which ends now."""
        times, has_chunks = self.engine or EngineTimes(), self.chunks > 0
        of_engine = msgspec.structs.asdict(times)
        taken, queue_s, prefill_s = of_engine.pop("arrived_s"), times.queue_s, times.prefill_s
        token_s = None
        if taken is not None and queue_s is not None and self._submitted:
            of_engine["queue_s"] = queue_s + max(0.0, taken - self._submitted)
            token_s = None if prefill_s is None else taken + queue_s + prefill_s - self._arrived
        return EndedRequest(
            id=self.request_id,
            worker=worker,
            role=role,
            outcome=outcome,
            arrived_ns=self.arrived_ns,
            ended_s=time.monotonic() - self._arrived,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            tokens=self.tokens if has_chunks else None,
            chunks=self.chunks if has_chunks else None,
            media_s=self._media or None,
            submitted_s=self._since(self._submitted),
            first_chunk_s=self._since(self.first_chunk),
            last_chunk_s=self._since(self._last_chunk),
            held_s=self._held if has_chunks else None,
            rested_s=self._rested if has_chunks else None,
            token_s=token_s,
            **of_engine,
        )

    def _since(self, moment: float) -> float | None:
        return moment - self._arrived if moment else None
