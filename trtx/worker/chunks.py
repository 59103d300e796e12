"""The LLM API's results become Dynamo's chunks: what is new since the last look, in one chunk.

A result is cumulative, so nothing queues between the engine and the wire: at low load a chunk holds one token, and
when chunks cost more than steps it holds several. Python and the runtime spend 60 to 75 us a chunk, not a token.
"""

from __future__ import annotations

from typing import Any

from dynamo.common.backend.logprobs import (
    extract_from_completion_output,
    extract_prompt_logprobs_from_completion_output,
)

from trtx.worker.request import WorkerRequest

Chunk = dict[str, Any]

# The LLM API's finish reasons, in Dynamo's words. A chunk without one of these is no terminal.
_FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "cancelled", "timeout": "cancelled"}


class ChunkWriter:
    """Turns one request's results into chunks; ``sent`` counts the tokens that were handed over.

    ``cached_tokens`` counts prompt tokens that this worker's engine found in its cache. Clients are told
    ``cached_at_prefill`` where it is given: how much of the prompt had to be computed was decided there.
    """

    def __init__(self, request: WorkerRequest, *, block_size: int | None, cached_at_prefill: int | None = None) -> None:
        self._request = request
        self._block_size = block_size
        self._cached_at_prefill = cached_at_prefill
        self._text_sent = 0
        self.sent = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None

    def next(self, result: Any) -> Chunk | None:
        """The chunk for what ``result`` holds beyond the last look, or None when that is nothing."""
        output = result.outputs[0]
        new_tokens = output.token_ids[self.sent :]
        # TensorRT-LLM may end a context_only request without a reason: its one token is its length.
        finish_reason = output.finish_reason or ("length" if result.finished else None)
        if not new_tokens and finish_reason is None:
            return None
        chunk: Chunk = {"token_ids": new_tokens, "index": 0}
        if self._request.has_stop_strings:
            # The engine's text is exact where a stop string begins inside a token; the frontend's, made from the
            # token ids, would show the beginning of it.
            text = output.text or ""
            chunk["text"] = text[self._text_sent :]
            self._text_sent = len(text)
        if self._request.wants_logprobs and new_tokens:
            log_probs, top_logprobs = extract_from_completion_output(output, self.sent)
            if log_probs is not None:
                chunk["log_probs"] = log_probs
            if top_logprobs is not None:
                chunk["top_logprobs"] = top_logprobs
        self.sent += len(new_tokens)
        if finish_reason is not None:
            self.finish_reason = _FINISH_REASONS[finish_reason]
            chunk["finish_reason"] = self.finish_reason
            self.cached_tokens = _cached_tokens(output, self._block_size, len(self._request.token_ids))
            chunk["completion_usage"] = self._usage()
            prompt_logprobs = extract_prompt_logprobs_from_completion_output(output)
            if prompt_logprobs:
                chunk["engine_data"] = {"prompt_logprobs": prompt_logprobs}
        return chunk

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
    perf = getattr(output, "request_perf_metrics", None)
    if perf is None or perf.kv_cache_metrics is None or block_size is None:
        return 0
    return min(int(perf.kv_cache_metrics.num_reused_blocks) * block_size, prompt_tokens)
