"""The LLM API's results become Dynamo's chunks: what is new since the last look, in one chunk.

A result is cumulative. The embedded engine's takes in all that came since the last look, so nothing queues between it
and the wire: at low load a chunk holds one token, and when chunks cost more than steps it holds several. Python and the
runtime spend 60 to 75 us a chunk, not a token. TensorRT-LLM's takes in one response a look
(tensorrt_llm/executor/result.py, ``_aresult_step``): where chunks cost more than its steps, its tokens wait there.
"""

from __future__ import annotations

from typing import Any

from dynamo.common.backend.logprobs import (
    extract_from_completion_output,
    extract_prompt_logprobs_from_completion_output,
)

from trtx.text import PlainText, StopStrings, Tokenizer
from trtx.worker.requests.request import WorkerRequest

Chunk = dict[str, Any]

NO_TRACE = {"trace_id": "0" * 32, "span_id": "0" * 16}
"""Dynamo hands on what a worker's chunks link to where it moves their request: with no trace in it, the one sign there
that a request has moved. Where Dynamo traces, it puts its own link in place of this (seen with 1.4.2)."""

# The LLM API's finish reasons, in Dynamo's words. A chunk without one of these is no terminal.
_FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "cancelled", "timeout": "cancelled"}


class ChunkWriter:
    """Turns one request's results into chunks; ``sent`` counts the tokens that were handed over.

    ``cached_tokens`` counts prompt tokens that this worker's engine found in its cache. Clients are told
    ``cached_at_prefill`` where it is given: how much of the prompt had to be computed was decided there, and
    ``prompt_logprobs`` in place of what this engine says, which did not see the prompt's logits.
    ``stops``: makes the text here; None: the frontend does. Tokens that may begin a stop string are held back; a stop
    string that is found ends the chunks, and the caller the request. ``tokenizer`` goes with ``stops``: where text is
    made here, the frontend makes none for logprobs either. ``hands_off``: of a prefill worker.
    """

    def __init__(
        self,
        request: WorkerRequest,
        *,
        block_size: int | None,
        cached_at_prefill: int | None = None,
        prompt_logprobs: Any = None,
        stops: StopStrings | PlainText | None = None,
        tokenizer: Tokenizer | None = None,
        hands_off: bool = False,
    ) -> None:
        self._request = request
        self._block_size = block_size
        self._cached_at_prefill = cached_at_prefill
        self._prompt_logprobs = prompt_logprobs
        self._stops = stops
        self._tokenizer = tokenizer if stops is not None else None
        # Whoever has the request next must not hold it to min_tokens. Of a prefill worker that is decode, always, which
        # sees this link in place of the one that came here.
        self._marks_move = "min_tokens" in request.sampling and (request.has_moved or not hands_off)
        self._seen = 0  # tokens of the result that were looked at; those past ``sent`` are held back
        self.sent = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None

    def next(self, result: Any) -> Chunk | None:
        """The chunk for what ``result`` holds beyond the last look, or None when that is nothing."""
        output = result.outputs[0]
        reason = output.finish_reason
        if reason == "not_finished":
            # A context_only request ends with "length"; TensorRT-LLM's executor/result.py (the line of 1.2) lets it say
            # this too, and its own router goes on after either. Dynamo knows only "length".
            reason = "length"
        end, text, pieces = len(output.token_ids), None, None
        if self._stops is not None:
            released = self._stops.feed(output.token_ids[self._seen : end], is_last=reason is not None)
            self._seen = end
            end, text, pieces = self.sent + len(released.pieces), released.text, released.pieces
            if released.stop is not None:
                reason = "stop"
        new_tokens = output.token_ids[self.sent : end]
        if not new_tokens and not text and reason is None:
            return None
        chunk: Chunk = {"token_ids": new_tokens, "index": 0}
        if text is not None:
            # Exact where a stop string begins inside a token; the frontend's, made from the token ids, would show the
            # beginning of it.
            chunk["text"] = text
        if self._request.wants_logprobs and new_tokens:
            self._add_logprobs(chunk, output, pieces)
        if self._marks_move and new_tokens and not self.sent:
            chunk["worker_trace_link"] = NO_TRACE
        self.sent += len(new_tokens)
        if reason is not None:
            self.finish_reason = _FINISH_REASONS[reason]
            chunk["finish_reason"] = self.finish_reason
            self.cached_tokens = _cached_tokens(output, self._block_size, len(self._request.token_ids))
            chunk["completion_usage"] = self._usage()
            prompt_logprobs = self._prompt_logprobs or extract_prompt_logprobs_from_completion_output(output)
            if prompt_logprobs:
                chunk["engine_data"] = {"prompt_logprobs": prompt_logprobs}
        return chunk

    def _add_logprobs(self, chunk: Chunk, output: Any, pieces: tuple[str, ...] | None) -> None:
        """For exactly the chunk's tokens: Dynamo drops all of them where there are more or fewer. ``pieces``: what each
        adds to the text, where that is made here."""
        count = len(chunk["token_ids"])
        log_probs, top_logprobs = extract_from_completion_output(
            output, self.sent, self._tokenizer, include_bytes=self._tokenizer is not None
        )
        if log_probs is not None:
            chunk["log_probs"] = log_probs[:count]
        if top_logprobs is not None:
            chunk["top_logprobs"] = top_logprobs[:count]
        if pieces is not None:
            chunk["tokens"] = [*pieces]

    def cancelled(self) -> Chunk:
        """The terminal chunk of a request that nobody waits for any more."""
        self.finish_reason = "cancelled"
        return {"token_ids": [], "index": 0, "finish_reason": "cancelled", "completion_usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        prompt = len(self._request.token_ids)
        cached = self.cached_tokens if self._cached_at_prefill is None else self._cached_at_prefill
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.sent,
            "total_tokens": prompt + self.sent,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _cached_tokens(output: Any, block_size: int | None, prompt_tokens: int) -> int:
    """Prompt tokens whose KV was found instead of computed, as far as the engine says (as Dynamo counts them)."""
    perf = output.request_perf_metrics
    if perf is None or perf.kv_cache_metrics is None or block_size is None:
        return 0
    return min(int(perf.kv_cache_metrics.num_reused_blocks) * block_size, prompt_tokens)
