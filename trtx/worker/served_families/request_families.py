"""Metric families of a worker's requests."""

from __future__ import annotations

from functools import partial

from trtx.engine.served_family import ServedFamily, recorded

FAMILIES: dict[str, ServedFamily] = {}
_family = partial(recorded, FAMILIES)

TIME_TO_FIRST_TOKEN = _family(
    "histogram",
    "trtx_time_to_first_token_seconds",
    "seconds",
    "From the request's arrival in this worker to its first token.",
)
INTER_TOKEN_LATENCY = _family(
    "histogram",
    "trtx_inter_token_latency_seconds",
    "seconds",
    "Between two tokens of one request; a chunk's tokens share its gap.",
)
CHUNK_TOKENS = _family("histogram", "trtx_chunk_tokens", "tokens", "Tokens that left together in one chunk.")
REQUESTS = _family("counter", "trtx_requests_total", "requests", "Requests that ended, by outcome.", "outcome")
PROMPT_TOKENS = _family("counter", "trtx_prompt_tokens_total", "tokens", "Prompt tokens of ended requests.")
CACHED_TOKENS = _family(
    "counter",
    "trtx_cached_tokens_total",
    "tokens",
    "Prompt tokens of ended requests that the prefix cache had.",
)
GENERATED_TOKENS = _family("counter", "trtx_generated_tokens_total", "tokens", "Tokens handed to the frontend.")
OPEN_REQUESTS = _family("gauge", "trtx_open_requests", "requests", "Requests between arrival and their end.")
