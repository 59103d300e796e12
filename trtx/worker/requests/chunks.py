"""Converts the LLM API's cumulative results to Dynamo's chunks, which hold the tokens since the last chunk.

A chunk costs 60 to 75 us in Python and the runtime, however many tokens it holds. The embedded engine merges all tokens
generated since the last chunk, so no tokens queue up: a chunk holds one token at low load, and several when chunks take
longer than engine steps. TensorRT-LLM returns one response at a time (tensorrt_llm/executor/result.py,
``_aresult_step``), so tokens queue up there under high load.
"""

from __future__ import annotations

from typing import Any

from dynamo.common.backend.logprobs import (
    extract_from_completion_output,
    extract_prompt_logprobs_from_completion_output,
)

from trtx.stop_strings import PlainText, StopStrings
from trtx.text import Tokenizer
from trtx.worker.requests.request import WorkerRequest

Chunk = dict[str, Any]

# Dynamo's finish reason for each of the LLM API's. Only a terminal chunk has one.
_FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "cancelled", "timeout": "cancelled"}


_OF_TOKENS = ("token_ids", "text", "log_probs", "top_logprobs")


def without_end(chunk: Chunk) -> tuple[Chunk, Chunk]:
    """Splits a terminal chunk: its tokens, and its end as a chunk without tokens.

    Dynamo 1.6.1 makes a forced tool call of the text, keeps the log-probabilities back until a chunk adds nothing to
    the call, and loses them if the answer ends before: with a named tool always, with ``required`` sometimes.
    """
    tokens = {name: value for name, value in chunk.items() if name in (*_OF_TOKENS, "index")}
    return tokens, {name: value for name, value in chunk.items() if name not in _OF_TOKENS} | {"token_ids": []}


class ChunkWriter:
    """Converts one request's results to chunks.

    ``sent`` counts the tokens in the chunks so far. ``cached_tokens`` counts the prompt tokens that this worker's
    engine found in its cache.
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
    ) -> None:
        """``cached_at_prefill`` and ``prompt_logprobs``: the values that the prefill worker reported. Clients get them
        instead of this engine's, because the prefill worker computed the prompt.

        ``stops``: detokenizes the answer in this worker, and holds back tokens that may begin a stop string. After a
        stop string there are no more chunks, and the caller must end the request. None: the frontend detokenizes.
        ``tokenizer``: detokenizes the logprobs when ``stops`` is given.
        """
        self._request = request
        self._block_size = block_size
        self._cached_at_prefill = cached_at_prefill
        self._prompt_logprobs = prompt_logprobs
        self._stops = stops
        self._tokenizer = tokenizer if stops is not None else None
        # A stop string that cuts a document makes the whole answer an error, which Dynamo 1.4.2 passes on with its
        # status and text only if nothing was sent before.
        self._waits_for_end = bool(request.stop_strings) and request.grammar is not None and request.grammar.is_document
        self._seen = 0  # number of tokens passed to ``stops``, which holds back the tokens after the first ``sent``
        self.sent = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None

    def next(self, result: Any) -> Chunk | None:
        """The next chunk: the tokens of ``result`` that were not sent yet. None if there is nothing to send.

        Raises InvalidRequest if a stop string cuts the document that the request's grammar demands.
        """
        output = result.outputs[0]
        reason = output.finish_reason
        if reason == "not_finished":
            # A context_only request ends with "length"; in TensorRT-LLM's executor/result.py (1.2) it may also end with
            # "not_finished", and TensorRT-LLM's own router accepts both. Dynamo accepts "length" only.
            reason = "length"
        if self._waits_for_end and reason is None:
            return None
        end, text, pieces = len(output.token_ids), None, None
        if self._stops is not None:
            released = self._stops.feed(output.token_ids[self._seen : end], is_last=reason is not None)
            self._seen = end
            end, text, pieces = self.sent + len(released.pieces), released.text, released.pieces
            if released.stop is not None:
                reason = "stop"
                if (grammar := self._request.grammar) is not None and (
                    cut := grammar.cut_by(released.stop)
                ) is not None:
                    raise cut
        new_tokens = output.token_ids[self.sent : end]
        if not new_tokens and not text and reason is None:
            return None
        chunk: Chunk = {"token_ids": new_tokens, "index": 0}
        if text is not None:
            # Send the text too: if a stop string begins inside a token, the text ends before the stop string. The
            # frontend detokenizes whole tokens and would show the beginning of the stop string.
            chunk["text"] = text
        if self._request.wants_logprobs and new_tokens:
            self._add_logprobs(chunk, output, pieces)
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
        """Adds one entry for each of the chunk's tokens; Dynamo 1.4.2 drops all of them if there are more or fewer.

        ``pieces`` is the text that each token adds, if this worker detokenizes.
        """
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
        """The terminal chunk of an aborted request."""
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
    """Number of prompt tokens found in the prefix cache, in whole blocks; 0 if the engine does not report it.

    Dynamo 1.4.2 counted so too. Dynamo 1.6.1 reads TensorRT-LLM's ``RequestOutput.cached_tokens``, in tokens.
    """
    perf = output.request_perf_metrics
    if perf is None or perf.kv_cache_metrics is None or block_size is None:
        return 0
    return min(int(perf.kv_cache_metrics.num_reused_blocks) * block_size, prompt_tokens)
