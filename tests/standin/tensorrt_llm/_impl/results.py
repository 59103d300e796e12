"""``RequestOutput``: the real one's surface over the torch engine's, with the real one's way with stop strings.

The real LLM matches stop strings in two places, and so does this: as a sequence of token ids (which then leave
``token_ids``, that grew before), and as text while detokenizing (which then leaves ``text`` alone). Nothing is held
back. (tensorrt_llm/executor/result.py, ``_handle_sequence`` and ``DetokenizedGenerationResultBase._handle_response``.)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import msgspec

from tensorrt_llm._facts import dataclass, public
from tensorrt_llm._impl.disagg import DisaggregatedParams
from tensorrt_llm._impl.sampling import stop_strings
from tensorrt_llm._impl.shared_tensor import SharedTensorContainer
from trtx.torch_engine.media_positions import position_delta
from trtx.torch_engine.messages import MediaSpan

_STATE = msgspec.msgpack.Decoder(tuple[bytes, list[MediaSpan] | None])

Logprob = dataclass("Logprob")
CompletionOutput = dataclass(
    "CompletionOutput",
    {
        "length": property(lambda self: len(self.token_ids)),
        "text_diff": property(lambda self: self.text[self._last_text_len :]),
        "token_ids_diff": property(lambda self: self.token_ids[self._last_token_ids_len :]),
        "logprobs_diff": property(lambda self: self.logprobs[self._last_logprobs_len :]),
    },
)


@plain_dataclass(slots=True)
class Feed:
    """Where a result's tokens come from, and what is asked of them. ``inner`` is the torch engine's output."""

    inner: Any
    sampling: Any
    streaming: bool
    prompt: str | None
    disaggregated_params: Any
    stop_words: list[tuple[str, list[int]]]
    decode: Callable[[list[int]], str] | None  # None: no text was asked for
    fail: Callable[[BaseException], BaseException]  # what an error of the torch engine is here
    seen: Callable[[], None]  # called at every step
    block_size: int = 0  # tokens in a block of KV; 0 for an encoder, which has none
    media: Any = None  # of a prompt with pictures: what the executor took of their handles
    asked_s: float = field(default_factory=time.monotonic)
    told_s: float | None = None  # its first step: with a handoff, all KV had come before it

    @property
    def receives(self) -> bool:
        return self.disaggregated_params is not None and self.disaggregated_params.request_type == "generation_only"

    def cached_tokens(self) -> int:
        """Prompt tokens that were in the cache: of a request that receives its KV, the whole prompt."""
        if self.receives:
            return len(self.inner.prompt_token_ids)
        given = self.inner.outputs[0].request_perf_metrics if self.block_size else None
        return 0 if given is None else given.kv_cache_metrics.num_reused_blocks * self.block_size

    def perf_metrics(self, given: Any) -> Any:
        """What the torch engine's ``given`` says, or None, with the times of a transfer where there was one."""
        if not self.receives or self.told_s is None:
            return given
        cache = SimpleNamespace(num_reused_blocks=0) if given is None else given.kv_cache_metrics
        timing = SimpleNamespace(
            kv_cache_transfer_start=timedelta(seconds=self.asked_s),
            kv_cache_transfer_end=timedelta(seconds=self.told_s),
            kv_cache_size=len(self.inner.prompt_token_ids),  # as if a token's KV had one byte
        )
        return SimpleNamespace(kv_cache_metrics=cache, timing_metrics=timing)


@public
class GenerationResult:
    """A request under way. Users never make one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{type(self).__name__} is made by LLM.generate_async; users are not expected to create it")

    @property
    def request_id(self) -> int:
        return self._feed.inner.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._feed.inner.prompt_token_ids

    @property
    def outputs(self) -> list[Any]:
        return self._outputs

    @property
    def context_logits(self) -> None:
        return None

    @property
    def cached_tokens(self) -> int:
        return self._feed.cached_tokens()

    @property
    def finished(self) -> bool:
        return self._done

    def abort(self) -> None:
        self._aborted = True
        self._feed.inner.abort()

    def aborted(self) -> bool:
        return self._aborted

    def result(self, timeout: float | None) -> Any:
        while not self._done:
            try:
                self._feed.inner.result(timeout)
            except (RuntimeError, ValueError) as error:
                raise self._feed.fail(error) from error
            self._step()
        return self

    async def aresult(self) -> Any:
        while not self._done:
            await self.__anext__()
        return self

    def __await__(self) -> Generator[Any, None, Any]:
        return self.aresult().__await__()

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        if self._done:
            raise StopAsyncIteration
        try:
            await self._feed.inner.__anext__()
        except (RuntimeError, ValueError) as error:
            raise self._feed.fail(error) from error
        self._step()
        return self

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        """The next step without an event loop: this one has its own, as long as it lasts."""
        if self._done:
            raise StopIteration
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self.__anext__())
        if self._done:
            self._loop.close()
        return self

    def __repr__(self) -> str:
        shown = ("request_id", "prompt_token_ids", "outputs", "finished")
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    # --- one response of the engine ---

    def _step(self) -> None:
        feed = self._feed
        feed.seen()
        feed.told_s = feed.told_s or time.monotonic()
        self._done = feed.inner.finished
        for output, given in zip(self._outputs, feed.inner.outputs, strict=True):
            if output.finish_reason is None:
                self._take(output, given)
        self._done = self._done or all(output.finish_reason is not None for output in self._outputs)

    def _take(self, output: Any, given: Any) -> None:
        feed = self._feed
        output._last_token_ids_len, output._last_text_len = len(output.token_ids), len(output.text)
        output._last_logprobs_len = len(output.logprobs)
        new = given.token_ids[len(output.token_ids) :]
        output.logprobs += [_logprobs(position) for position in given.logprobs[len(output.logprobs) :]]
        if given.prompt_logprobs and not output.prompt_logprobs:
            output.prompt_logprobs = [_logprobs(position) for position in given.prompt_logprobs]
        output.cumulative_logprob = given.cumulative_logprob
        if feed.sampling.return_perf_metrics:
            output.request_perf_metrics = feed.perf_metrics(given.request_perf_metrics)
        self._hand_over(output, given)
        output.finish_reason, output.stop_reason = given.finish_reason, given.stop_reason
        for token_id in new:
            output.token_ids.append(token_id)
            if self._ends_with_stop_word(output):
                break
        if feed.decode is not None:
            is_whole = len(output.token_ids) == len(given.token_ids)
            output.text = given.text if is_whole else feed.decode(output.token_ids)
            self._cut_text(output)

    def _ends_with_stop_word(self, output: Any) -> bool:
        for stop, token_ids in self._feed.stop_words:
            if output.token_ids[-len(token_ids) :] == token_ids:
                output.finish_reason, output.stop_reason = "stop", stop
                if not self._feed.sampling.include_stop_str_in_output:
                    del output.token_ids[-len(token_ids) :]
                output.logprobs = output.logprobs[: len(output.token_ids)]
                self._end_inner()
                return True
        return False

    def _cut_text(self, output: Any) -> None:
        for stop in stop_strings(self._feed.sampling):
            position = output.text.find(stop)
            if position >= 0 and output.finish_reason in (None, "stop", "length"):
                end = position + len(stop) if self._feed.sampling.include_stop_str_in_output else position
                output.text = output.text[:end]
                output.finish_reason, output.stop_reason = "stop", stop
                self._end_inner()
                return

    def _end_inner(self) -> None:
        if len(self._outputs) == 1 and not self._feed.inner.finished:
            self._feed.inner.abort()

    def _hand_over(self, output: Any, given: Any) -> None:
        asked, made = self._feed.disaggregated_params, given.disaggregated_params
        if made is not None and made.opaque_state is not None:  # ended by its first token: there is no handover
            self.disaggregated_params = DisaggregatedParams(
                request_type=made.request_type,
                first_gen_tokens=made.first_gen_tokens,
                first_gen_log_probs=[_logprobs(position) for position in made.first_gen_log_probs]
                if made.first_gen_log_probs
                else None,
                ctx_request_id=made.ctx_request_id,
                opaque_state=_state(made),
                **_positions(self._feed.media),
                **{
                    name: getattr(asked, name)
                    for name in ("disagg_request_id", "ctx_dp_rank", "ctx_info_endpoint", "schedule_style")
                    if hasattr(asked, name)
                },
            )
        output.disaggregated_params = self.disaggregated_params


@public
class RequestOutput(GenerationResult):
    """What ``LLM.generate_async`` returns."""

    @property
    def prompt(self) -> str | None:
        return self._feed.prompt


def request_output(feed: Feed) -> RequestOutput:
    made = RequestOutput.__new__(RequestOutput)
    made._feed = feed
    made._outputs = [CompletionOutput(index) for index in range(feed.sampling.n)]
    made._done = made._aborted = False
    made.disaggregated_params = feed.disaggregated_params
    made.metrics_dict = {}
    made._loop = None
    return made


def _state(made: Any) -> bytes:
    """The torch engine's, with what decode needs of media: the real transceiver's KV needs none of it."""
    return msgspec.msgpack.encode((made.opaque_state, made.media))


def torch_state(opaque_state: bytes | None) -> dict[str, Any]:
    """Its fields of ``DisaggregatedParams``."""
    if opaque_state is None:
        return {}
    state, media = _STATE.decode(opaque_state)
    return {"opaque_state": state, "media": media}


def _positions(media: Any) -> dict[str, Any]:
    """Handles for decode, of a prompt whose own were used up."""
    if media is None or media.positions is None:
        return {}
    return {
        "mrope_position_ids_handle": SharedTensorContainer.from_tensor(media.positions).dump_to_dict(),
        "mrope_position_deltas_handle": SharedTensorContainer.from_tensor(media.deltas).dump_to_dict(),
    }


def check_positions(params: Any) -> None:
    """Decode of a prompt whose pictures took positions of their own goes on by what prefill says of them. Raises
    RuntimeError as the real one does for one handle of two; KeyError for none, where its forward pass would go on by
    the positions of text; RuntimeError for another prompt's."""
    ids, deltas = params.mrope_position_ids_handle, params.mrope_position_deltas_handle
    if (ids is None) != (deltas is None):
        raise RuntimeError("`mrope_position_ids_handle` and `mrope_position_deltas_handle` must both be provided")
    media = torch_state(params.opaque_state).get("media") or []
    if not media or media[0].grid is None:
        return
    if ids is None:
        raise KeyError("mrope_config")
    SharedTensorContainer.from_dict(ids).get_local_view()  # as the real executor does: reading it frees the handle
    delta = int(SharedTensorContainer.from_dict(deltas).get_local_view())
    if delta != position_delta(media):
        raise RuntimeError(f"a delta of {delta} is another prompt's")


def _logprobs(position: dict[int, Any]) -> dict[int, Any]:
    return {token_id: Logprob(logprob, rank) for token_id, (logprob, rank) in position.items()}
