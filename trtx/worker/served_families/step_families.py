"""Metric families of the engine: its last step, sums over all steps, and grammars."""

from __future__ import annotations

from functools import partial

from trtx.engine.served_family import TEXT_ROLES, ServedFamily, recorded

_STEPS = "once the engine reports iteration statistics"
_TORCH = "with the torch engine"

FAMILIES: dict[str, ServedFamily] = {}
_family = partial(recorded, FAMILIES)

# --- engine: the last step ---

RUNNING_REQUESTS = _family("gauge", "trtx_running_requests", "requests", "Requests in the engine's running set.")
QUEUED_REQUESTS = _family("gauge", "trtx_queued_requests", "requests", "Requests that wait for the engine.")
QUEUED_CONTEXT_TOKENS = _family(
    "gauge",
    "trtx_queued_context_tokens",
    "tokens",
    "Prompt tokens that wait for the engine.",
    by=TEXT_ROLES,
    when=_STEPS,
)
PAUSED_REQUESTS = _family(
    "gauge",
    "trtx_paused_requests",
    "requests",
    "Preempted requests that wait to resume.",
    by=TEXT_ROLES,
    when=_STEPS,
)
BATCH_REQUESTS = _family(
    "gauge", "trtx_batch_requests", "requests", "Requests in the last step.", by=TEXT_ROLES, when=_STEPS
)
BATCH_CONTEXT_TOKENS = _family(
    "gauge", "trtx_batch_context_tokens", "tokens", "Prompt tokens in the last step.", by=TEXT_ROLES, when=_STEPS
)
BATCH_DECODES = _family(
    "gauge",
    "trtx_batch_decode_requests",
    "requests",
    "Requests in the last step that were past their prompt.",
    by=TEXT_ROLES,
    when=_STEPS,
)
QUEUE_SECONDS = _family(
    "gauge",
    "trtx_queue_seconds",
    "seconds",
    "Queue time of the requests last admitted, mean.",
    by=TEXT_ROLES,
    when=_STEPS,
)
ITERATION_SECONDS = _family(
    "gauge", "trtx_iteration_seconds", "seconds", "Duration of the last step.", by=TEXT_ROLES, when=_STEPS
)

# --- engine: sums over all steps ---

STEP_SECONDS = _family(
    "histogram", "trtx_step_seconds", "seconds", "Duration of each step.", by=TEXT_ROLES, when=_STEPS
)
STEP_PROMPT_TOKENS = _family(
    "counter", "trtx_step_prompt_tokens_total", "tokens", "Prompt tokens that steps computed.", by=TEXT_ROLES,
    when=_STEPS,
)  # fmt: skip
STEP_DECODES = _family(
    "counter",
    "trtx_step_decodes_total",
    "requests",
    "Requests past their prompt, summed over steps: the number of tokens from decode steps, without accepted drafts.",
    by=TEXT_ROLES,
    when=_STEPS,
)
DEVICE_WAIT_SECONDS = _family(
    "counter",
    "trtx_step_device_wait_seconds_total",
    "seconds",
    "Step time in which the host waited for the GPU. The rest of the step time is the host's: if the wait is near 0 "
    "while steps run back to back, the GPU waits for the host between steps.",
    by=TEXT_ROLES,
    when=f"{_TORCH} on a GPU",
)
ADMITTED_REQUESTS = _family(
    "counter",
    "trtx_admitted_requests_total",
    "requests",
    "Requests that left the engine's queue for their first step.",
    by=TEXT_ROLES,
    when=_STEPS,
)
ADMITTED_QUEUE_SECONDS = _family(
    "counter",
    "trtx_admitted_queue_seconds_total",
    "seconds",
    "Queue time of these requests, summed.",
    by=TEXT_ROLES,
    when=_STEPS,
)
PREEMPTIONS = _family(
    "counter",
    "trtx_preemptions_total",
    "requests",
    "Running requests that lost their KV blocks to others and were queued again.",
    by=TEXT_ROLES,
    when=_TORCH,
)
GRAPH_MISSES = _family(
    "counter",
    "trtx_graph_misses_total",
    "forwards",
    "Forwards without a CUDA graph although graphs of their kind exist, because they fit in no bucket.",
    by=TEXT_ROLES,
    when=f"{_TORCH}, if it captured CUDA graphs",
)

# --- experts ---

_EXPERTS = f"{_TORCH} and a mixture of experts, once a second of steps is over"
EXPERT_TOKENS = _family(
    "counter",
    "trtx_expert_tokens_total",
    "tokens",
    "Tokens that routers sent to experts: each token counts once for each of its experts in each layer.",
    by=TEXT_ROLES,
    when=_EXPERTS,
)
EXPERT_IMBALANCE = _family(
    "gauge",
    "trtx_expert_imbalance",
    "ratio",
    "Load of the busiest expert or rank, divided by the mean load, in each layer over the last second of steps; mean "
    "over layers. 1 is even. There is no value for ranks if one rank holds all experts.",
    "of",
    by=TEXT_ROLES,
    when=_EXPERTS,
)

# --- weights ---

SHARED_WEIGHTS = _family(
    "gauge",
    "trtx_shared_weight_bytes",
    "bytes",
    "Weights that the worker shares with others on its device, by how it got them: loaded, or mapped from another "
    "worker. Each of them reports the same copy.",
    "source",
    by=TEXT_ROLES,
    when=f"{_TORCH}, if the topology has --share-weights",
)

# --- structured output ---

GRAMMAR_LOOKUPS = _family(
    "counter",
    "trtx_grammar_lookups_total",
    "grammars",
    "Grammars of requests, by outcome: compiled, or cached from an earlier request.",
    "outcome",
    by=TEXT_ROLES,
    when=f"{_TORCH}, if it has guided decoding",
)
GRAMMARS_CACHED = _family(
    "gauge",
    "trtx_grammars_cached",
    "grammars",
    "Compiled grammars in the cache.",
    by=TEXT_ROLES,
    when=f"{_TORCH}, if it has guided decoding",
)
