"""An engine that makes tokens by a clock: the LLM API with a known right answer.

It calibrates the measuring chain, whose TTFT and ITL must come out as ``paced_ttft_ms`` and ``paced_itl_ms``, and
carries the streaming benchmark. It has no weights and no KV, and its tokens mean nothing; they are deterministic.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtx.torch_engine.sampling import SamplingParams

CATCH_UP_SECONDS = 0.05
"""How far the clock may run behind and still keep its rate; later than this, steps are dropped as a stalled engine's."""


class RequestError(RuntimeError):
    pass


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: Any = None
    ctx_request_id: int | None = None
    disagg_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: Any = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: Any = None


@dataclass(slots=True)
class CompletionOutput:
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    disaggregated_params: Any = None


class RequestOutput:
    def __init__(self, loop):
        self.outputs = [CompletionOutput()]
        self.finished = False
        self._seen = 0
        self._waiter = None
        self._loop = loop
        self._aborted = False
        self._over = False

    def abort(self):
        self._aborted = True

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self._over:
            raise StopAsyncIteration
        while not self.finished and len(self.outputs[0].token_ids) == self._seen:
            self._waiter = self._loop.create_future()
            await self._waiter
        self._seen = len(self.outputs[0].token_ids)
        self._over = self.finished
        return self

    def wake(self):
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(frozen=True, slots=True)
class PacedArgs:
    """Milliseconds and tokens. ``paced_*`` 0: no delay."""

    paced_ttft_ms: float
    paced_itl_ms: float
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int


@dataclass(slots=True, eq=False)
class _Running:
    output: RequestOutput
    ready_at: float  # monotonic seconds: not before this does it get a token
    position: int  # of the next token, counted over prompt and output
    left: int  # tokens still to make
    hands_off: bool


class LLM:
    """The LLM API over one clock. Every step gives one token to each request whose ``paced_ttft_ms`` has passed.

    The clock starts anew with a request that finds the engine idle; any other waits for the next step, as it would in
    a real engine. So TTFT is exact at concurrency 1 and up to one step more above, and ITL is exact always.
    """

    def __init__(self, model: str | Path, **llm_args: Any) -> None:
        directory = Path(model)
        self.args = _resolve(directory, llm_args)
        self._tokens = _ordinary_tokens(directory)
        self._arrivals: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._wake = threading.Condition()
        self._stopped = False
        self._iterations = 0
        self._thread = threading.Thread(target=self._run, name="paced-engine", daemon=True)
        self._thread.start()

    def generate_async(
        self,
        inputs: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        streaming: bool = False,
        disaggregated_params: DisaggregatedParams | None = None,
        **_: Any,
    ) -> RequestOutput:
        sampling = sampling_params or SamplingParams()
        output = RequestOutput(asyncio.get_running_loop())
        kind = disaggregated_params.request_type if disaggregated_params else None
        request = _Running(
            output,
            ready_at=time.monotonic() + self.args.paced_ttft_ms / 1000,
            position=len(inputs),
            left=1 if kind == "context_only" else sampling.max_tokens,
            hands_off=kind == "context_only",
        )
        if kind == "generation_only":
            first = disaggregated_params.first_gen_tokens
            output.outputs[0].token_ids += first
            request.position += len(first)
            request.left -= len(first)
            request.ready_at = time.monotonic()
        if request.left <= 0:
            output.outputs[0].finish_reason = "length"
            output.finished = True
            return output
        with self._wake:
            self._arrivals.append(request)
            self._wake.notify()
        return output

    def shutdown(self) -> None:
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join(timeout=5)

    def get_kv_cache_capacity(self) -> dict[str, int]:
        return {"tokensPerBlock": 32}

    def get_stats(self, timeout: float = 2) -> list[dict[str, Any]]:
        return []

    def get_kv_cache_events(self, timeout: float = 2) -> list[dict[str, Any]]:
        return []

    def _run(self) -> None:
        next_step = 0.0
        itl = self.args.paced_itl_ms / 1000
        while True:
            with self._wake:
                while not self._stopped and not self._arrivals and not self._running:
                    self._wake.wait()
                if self._stopped:
                    return
                while self._arrivals and len(self._running) < self.args.max_batch_size:
                    self._running.append(self._arrivals.popleft())
                now = time.monotonic()
                earliest = min(r.ready_at for r in self._running)
                if next_step <= now - CATCH_UP_SECONDS or earliest > next_step:
                    next_step = max(earliest, now) if earliest > now else now
                if next_step > now:
                    self._wake.wait(next_step - now)
                    continue
            self._step(next_step)
            next_step = next_step + itl if itl else time.monotonic()
            if not itl:
                time.sleep(0)

    def _step(self, at: float) -> None:
        touched = []
        keep = []
        for r in self._running:
            completion = r.output.outputs[0]
            if r.output._aborted:
                completion.finish_reason = "cancelled"
                r.output.finished = True
                touched.append(r.output)
                continue
            if r.ready_at > at:
                keep.append(r)
                continue
            completion.token_ids.append(self._tokens[r.position % len(self._tokens)])
            r.position += 1
            r.left -= 1
            if not r.left:
                if r.hands_off:
                    completion.disaggregated_params = DisaggregatedParams(
                        request_type="context_only", first_gen_tokens=list(completion.token_ids), opaque_state=b"paced"
                    )
                completion.finish_reason = "length"
                r.output.finished = True
            else:
                keep.append(r)
            touched.append(r.output)
        self._running = keep
        if touched:
            touched[0]._loop.call_soon_threadsafe(lambda: [o.wake() for o in touched])


def _resolve(directory: Path, llm_args: dict[str, Any]) -> PacedArgs:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return PacedArgs(
        paced_ttft_ms=float(llm_args.get("paced_ttft_ms", 0)),
        paced_itl_ms=float(llm_args.get("paced_itl_ms", 0)),
        max_seq_len=llm_args.get("max_seq_len") or config.get("max_position_embeddings", 8192),
        max_batch_size=llm_args.get("max_batch_size") or 2048,
        max_num_tokens=llm_args.get("max_num_tokens") or 8192,
    )


def _ordinary_tokens(directory: Path) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return [i for t, i in sorted(tokenizer.get_vocab().items(), key=lambda x: x[1]) if t.isascii() and t.isalpha()][:64]
