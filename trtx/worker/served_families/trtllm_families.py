"""Metric families under the names of TensorRT-LLM's own metrics, and of what Dynamo's TensorRT-LLM worker adds.

The names are those of ``tensorrt_llm.metrics.MetricsCollector`` and of ``dynamo.trtllm.metrics`` of Dynamo 1.6.1. Three
kinds of their families are missing here: perplexities, which no engine reports; bytes between KV tiers, which are
``trtx_kv_tier_bytes_total``; and HTTP codes of errors, which the frontend counts.
"""

from __future__ import annotations

from trtx.engine.served_family import TEXT_ROLES, Kind, ServedFamily, Unit, recorded

FAMILIES: dict[str, ServedFamily] = {}
_ROWS = "once the engine reports it in its iteration statistics"
_DRAFTS = "if the engine speculates"


def _family(
    kind: Kind, name: str, unit: Unit, meaning: str, *labels: str, by: tuple[str, ...] = TEXT_ROLES, when: str = ""
) -> ServedFamily:
    return recorded(FAMILIES, kind, f"trtllm_{name}", unit, meaning, "engine_type", *labels, by=by, when=when)  # type: ignore[arg-type]


def _gauge(name: str, unit: Unit, meaning: str, when: str = _ROWS) -> ServedFamily:
    return _family("gauge", name, unit, meaning, when=when)


# --- requests that ended ---

SUCCESSES = _family(
    "counter", "request_success_total", "requests", "Requests that ended without an error.", "finished_reason"
)
E2E_SECONDS = _family(
    "histogram", "e2e_request_latency_seconds", "seconds", "From the request's arrival in the worker to its end."
)
TTFT_SECONDS = _family(
    "histogram",
    "time_to_first_token_seconds",
    "seconds",
    "From the request's arrival in the worker to its first chunk.",
)
TPOT_SECONDS = _family(
    "histogram", "time_per_output_token_seconds", "seconds", "Mean time between the tokens of a request."
)
QUEUE_SECONDS = _family(
    "histogram", "request_queue_time_seconds", "seconds", "Time of a request in the engine's queue."
)
PREFILL_SECONDS = _family(
    "histogram", "request_prefill_time_seconds", "seconds", "From a request's first step to its first token."
)
DECODE_SECONDS = _family(
    "histogram", "request_decode_time_seconds", "seconds", "From a request's first token to its last one."
)
INFERENCE_SECONDS = _family(
    "histogram", "request_inference_time_seconds", "seconds", "From a request's first step to its last token."
)
PROMPT_TOKENS = _family("counter", "prompt_tokens_total", "tokens", "Prompt tokens of these requests.")
GENERATION_TOKENS = _family("counter", "generation_tokens_total", "tokens", "Output tokens of these requests.")
CACHED_TOKENS = _family(
    "counter", "prompt_cached_tokens_total", "tokens", "Prompt tokens of these requests that the prefix cache had."
)
REQUEST_CACHED_TOKENS = _family(
    "histogram", "prompt_cached_tokens_per_request", "tokens", "Prompt tokens of a request that the prefix cache had."
)

# --- iterations ---

RUNNING = _gauge("num_requests_running", "requests", "Requests in the engine's running set.")
WAITING = _gauge("num_requests_waiting", "requests", "Requests that wait for the engine.")
COMPLETED = _family(
    "counter", "num_requests_completed_total", "requests", "Requests that the engine has completed.", when=_ROWS
)
MAX_RUNNING = _gauge("max_num_active_requests", "requests", "The most requests that the engine runs at once.")
ITERATION_SECONDS = _gauge("iteration_latency_seconds", "seconds", "Duration of the last step.")
GPU_MEMORY = _gauge("gpu_memory_usage_bytes", "bytes", "GPU memory of the engine.")
CPU_MEMORY = _gauge("cpu_memory_usage_bytes", "bytes", "Host memory of the engine.")
PINNED_MEMORY = _gauge("pinned_memory_usage_bytes", "bytes", "Pinned host memory of the engine.")
STATIC_BATCH = _gauge("max_batch_size_static", "requests", "max_batch_size of the engine config.")
RUNTIME_BATCH = _gauge("max_batch_size_runtime", "requests", "max_batch_size that the engine uses now.")
RUNTIME_TOKENS = _gauge("max_num_tokens_runtime", "tokens", "max_num_tokens that the engine uses now.")
CONTEXT_REQUESTS = _gauge("num_context_requests", "requests", "Requests in the last step that computed their prompt.")
GENERATION_REQUESTS = _gauge("num_generation_requests", "requests", "Requests in the last step past their prompt.")
PAUSED_REQUESTS = _gauge("num_paused_requests", "requests", "Preempted requests that wait to resume.")
SCHEDULED_REQUESTS = _gauge("num_scheduled_requests", "requests", "Requests in the last step.")
CONTEXT_TOKENS = _gauge("total_context_tokens", "tokens", "Prompt tokens in the last step.")
DECODED_TOKENS = _gauge("avg_decoded_tokens_per_iter", "tokens", "Output tokens of the last step for each request.")
PREFILL_OCCUPANCY = _gauge(
    "prefill_batch_occupancy", "share", "num_context_requests by max_num_active_requests, in the last step."
)
PREFILL_TOKENS = _family(
    "histogram", "prefill_batch_tokens", "tokens", "Prompt tokens of each step that had some.", when=_ROWS
)

# --- KV cache ---

KV_HIT_RATE = _gauge("kv_cache_hit_rate", "share", "Share of prompt blocks found in the prefix cache.")
KV_UTILIZATION = _gauge("kv_cache_utilization", "share", "kv_cache_used_blocks by kv_cache_max_blocks.")
KV_MAX_BLOCKS = _gauge("kv_cache_max_blocks", "blocks", "KV blocks in the pool.")
KV_FREE_BLOCKS = _gauge("kv_cache_free_blocks", "blocks", "KV blocks that a request can take.")
KV_USED_BLOCKS = _gauge("kv_cache_used_blocks", "blocks", "KV blocks that requests and leases hold.")
KV_BLOCK_TOKENS = _gauge("kv_cache_tokens_per_block", "tokens", "Tokens of a KV block.")
KV_REUSED_BLOCKS = _family(
    "counter", "kv_cache_reused_blocks_total", "blocks", "Prompt blocks found in the prefix cache.", when=_ROWS
)
KV_MISSED_BLOCKS = _family(
    "counter", "kv_cache_missed_blocks_total", "blocks", "Prompt blocks not found in the prefix cache.", when=_ROWS
)

# --- speculation ---

DRAFT_TOKENS = _family(
    "counter", "spec_decode_num_draft_tokens_total", "tokens", "Draft tokens that were checked.", when=_DRAFTS
)
ACCEPTED_TOKENS = _family(
    "counter", "spec_decode_num_accepted_tokens_total", "tokens", "Draft tokens that were accepted.", when=_DRAFTS
)
ACCEPTANCE_LENGTH = _gauge(
    "spec_decode_acceptance_length", "tokens", "Tokens of the last step for each request that had drafts.", _DRAFTS
)
DRAFT_OVERHEAD = _gauge("spec_decode_draft_overhead", "share", "Share of the last step that drafting took.", _DRAFTS)

# --- what Dynamo's TensorRT-LLM worker adds ---

ABORTED = _family("counter", "num_aborted_requests_total", "requests", "Requests that were cancelled.")
IMAGE_REQUESTS = _family("counter", "request_type_image_total", "requests", "Requests with images.")
GRAMMAR_REQUESTS = _family(
    "counter", "request_type_structured_output_total", "requests", "Requests whose answer follows a grammar."
)
TRANSFERS = _family(
    "counter", "kv_transfer_success_total", "requests", "Requests whose KV has arrived.", by=("decode",)
)
TRANSFER_SECONDS = _family(
    "histogram", "kv_transfer_latency_seconds", "seconds", "Time of the read of a request's KV.", by=("decode",)
)
TRANSFER_BYTES = _family("histogram", "kv_transfer_bytes", "bytes", "Bytes of KV of a request.", by=("decode",))
TRANSFER_SPEED = _family(
    "histogram", "kv_transfer_speed_gb_s", "GB/s", "Speed of the read of a request's KV.", by=("decode",)
)
_EVENTS = "if the worker publishes KV events"
EVENT_CAPACITY = _gauge("kv_event_buffer_capacity", "events", "event_buffer_max_size of the engine config.", _EVENTS)
EVENT_BATCH = _family(
    "histogram", "kv_event_drain_batch_size", "events", "KV events of each read that found some.", when=_EVENTS
)
LOST_EVENTS = _family(
    "counter",
    "kv_event_id_gap_events_total",
    "events",
    "KV events that the engine dropped before they were read.",
    when=_EVENTS,
)
