"""Every metric family that a worker serves, one record each.

The collectors of a worker make their families from these records, and ``docs/reference/served-metrics.md`` lists them.
``upstream_families`` has those of Dynamo that trtx relies on.
"""

from __future__ import annotations

from trtx.worker.served_family import ROLES, TEXT_ROLES, Kind, ServedFamily, Server, Unit

_STEPS = "once the engine reports iteration statistics"
_TORCH = "with the torch engine"
_GPU = "if NVML gives the value for a GPU of the worker"
_IMAGES = "for a model with images"
_CACHE = "for a model with images, if the worker caches embeddings"
_HANDOFF: tuple[Server, ...] = ("prefill", "decode")
_COUNTED = "if the engine counts handoffs"

FAMILIES: dict[str, ServedFamily] = {}
"""Every family of a worker, by name."""


def _family(
    kind: Kind,
    name: str,
    unit: Unit,
    meaning: str,
    *labels: str,
    by: tuple[Server, ...] = ROLES,
    when: str = "",
) -> ServedFamily:
    assert name not in FAMILIES and name.endswith("_total") == (kind == "counter"), name
    FAMILIES[name] = ServedFamily(name, kind, unit, meaning, labels, by, when)
    return FAMILIES[name]


# --- requests ---

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
    "Requests past their prompt, summed over steps: the tokens that decode steps computed.",
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
    "Forwards that ran without a CUDA graph, although graphs of their kind exist: no bucket holds them.",
    by=TEXT_ROLES,
    when=f"{_TORCH}, if it captured CUDA graphs",
)

# --- KV cache ---

KV_BLOCKS = _family(
    "gauge",
    "trtx_kv_blocks",
    "blocks",
    "KV blocks in the pool. Tier gpu is the pool that steps read, also on a worker without a GPU.",
    "tier",
    by=TEXT_ROLES,
    when="if the engine has a KV pool",
)
KV_BLOCKS_USED = _family(
    "gauge",
    "trtx_kv_blocks_used",
    "blocks",
    "KV blocks that requests and leases hold.",
    "tier",
    by=TEXT_ROLES,
    when="if the engine has a KV pool",
)
KV_HIT_RATE = _family(
    "gauge",
    "trtx_kv_hit_rate",
    "share",
    "Share of prompt blocks found in the prefix cache, since the worker's start.",
    "tier",
    by=TEXT_ROLES,
    when=_STEPS,
)
KV_LOOKUPS = _family(
    "counter",
    "trtx_kv_block_lookups_total",
    "blocks",
    "Prompt blocks looked up in the prefix cache, by outcome: hit or miss.",
    "tier",
    "outcome",
    by=TEXT_ROLES,
    when=_STEPS,
)
LOST_KV_EVENTS = _family(
    "counter", "trtx_lost_kv_events_total", "events", "KV events that the engine dropped before they were read."
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

# --- speculation ---

_SPECULATION = f"{_TORCH}, if it speculates"
DRAFTS = _family(
    "counter",
    "trtx_drafts_total",
    "requests",
    "Requests that got drafted tokens, summed over steps. The acceptance length is 1 plus the accepted tokens of each.",
    by=TEXT_ROLES,
    when=_SPECULATION,
)
DRAFT_TOKENS = _family(
    "counter",
    "trtx_draft_tokens_total",
    "tokens",
    "Drafted tokens, by position in the draft.",
    "position",
    by=TEXT_ROLES,
    when=_SPECULATION,
)
ACCEPTED_DRAFT_TOKENS = _family(
    "counter",
    "trtx_accepted_draft_tokens_total",
    "tokens",
    "Drafted tokens that the model sampled too, by position in the draft.",
    "position",
    by=TEXT_ROLES,
    when=_SPECULATION,
)
DRAFTING_SECONDS = _family(
    "counter",
    "trtx_drafting_seconds_total",
    "seconds",
    "Step time that drafting took on the host.",
    by=TEXT_ROLES,
    when=_SPECULATION,
)

# --- handoff ---

WHOLE_REQUESTS = _family(
    "counter",
    "trtx_whole_requests_total",
    "requests",
    "Requests that a decode worker served without a handoff.",
    by=_HANDOFF,
)
PAIR_HANDOFFS = _family(
    "counter",
    "trtx_pair_handoffs_total",
    "requests",
    "Requests from a prefill worker, by what became of their KV. A pair appears with its first request.",
    "prefill",
    "outcome",
    by=_HANDOFF,
)
PAIR_BYTES = _family(
    "counter", "trtx_pair_handoff_bytes_total", "bytes", "Bytes of KV from a prefill worker.", "prefill", by=_HANDOFF
)
PAIR_SECONDS = _family(
    "counter", "trtx_pair_handoff_seconds_total", "seconds", "Time of these reads, summed.", "prefill", by=_HANDOFF
)
HANDOFF_READS = _family(
    "counter",
    "trtx_handoff_reads_total",
    "handoffs",
    "KV handoffs read from prefill workers.",
    by=TEXT_ROLES,
    when=_COUNTED,
)
HANDOFF_BYTES = _family(
    "counter",
    "trtx_handoff_bytes_total",
    "bytes",
    "Bytes of KV read from prefill workers.",
    by=TEXT_ROLES,
    when=_COUNTED,
)
HANDOFF_SECONDS = _family(
    "counter", "trtx_handoff_seconds_total", "seconds", "Time of these reads, summed.", by=TEXT_ROLES, when=_COUNTED
)
RECOMPUTED = _family(
    "counter",
    "trtx_recomputed_prefixes_total",
    "requests",
    "Prompts computed again because their KV was gone.",
    by=TEXT_ROLES,
    when=_COUNTED,
)
FAILED_READS = _family(
    "counter", "trtx_handoff_failed_reads_total", "handoffs", "KV reads that failed.", by=TEXT_ROLES, when=_COUNTED
)
LEASES = _family(
    "gauge", "trtx_leases", "leases", "KV handoffs that wait for a decode worker.", by=TEXT_ROLES, when=_COUNTED
)
EXPIRED_LEASES = _family(
    "counter",
    "trtx_expired_leases_total",
    "leases",
    "Leases that no decode worker read in time.",
    by=TEXT_ROLES,
    when=_COUNTED,
)
CORRUPTED = _family(
    "counter",
    "trtx_corrupted_handoffs_total",
    "handoffs",
    "KV handoffs that TRTX_FAULT corrupted on purpose.",
    by=TEXT_ROLES,
    when=_COUNTED,
)

# --- images ---

CACHE_LOOKUPS = _family(
    "counter",
    "trtx_embedding_cache_lookups_total",
    "images",
    "Images that requests asked for, by outcome: hit, joined (in progress for another request) or miss.",
    "outcome",
    when=_CACHE,
)
CACHE_EVICTIONS = _family(
    "counter", "trtx_embedding_cache_evictions_total", "embeddings", "Embeddings that made room.", when=_CACHE
)
CACHE_BYTES = _family("gauge", "trtx_embedding_cache_bytes", "bytes", "Bytes of embeddings held.", when=_CACHE)
CACHE_PINNED_BYTES = _family(
    "gauge",
    "trtx_embedding_cache_pinned_bytes",
    "bytes",
    "Bytes of embeddings that open requests use, or that are being made.",
    when=_CACHE,
)
CACHE_EMBEDDINGS = _family("gauge", "trtx_embedding_cache_pictures", "embeddings", "Embeddings held.", when=_CACHE)
MEDIA_SECONDS = _family(
    "counter", "trtx_media_seconds_total", "seconds", "Time that images took, by stage.", "stage", when=_IMAGES
)
MEDIA_IMAGES = _family(
    "counter", "trtx_media_pictures_total", "images", "Images that passed, by stage.", "stage", when=_IMAGES
)
MEDIA_OPEN = _family(
    "gauge",
    "trtx_media_open_calls",
    "calls",
    "Calls in progress, by stage; those of stage encode wait for the encoder or are in its batch.",
    "stage",
    when=_IMAGES,
)
ENCODER_RETRIES = _family(
    "counter", "trtx_encoder_retries_total", "calls", "Calls made again at another encode worker.", when=_IMAGES
)
ENCODER_FALLBACKS = _family(
    "counter",
    "trtx_encoder_fallbacks_total",
    "images",
    "Images encoded in this worker because no encode worker answered.",
    when=_IMAGES,
)

# --- processes: prometheus_client's names, with one label more ---

PROCESS_MEMORY = _family(
    "gauge", "process_resident_memory_bytes", "bytes", "Resident memory of the worker's process.", "process"
)
PROCESS_CPU = _family(
    "counter", "process_cpu_seconds_total", "seconds", "User and system CPU time of the process.", "process"
)
PROCESS_FDS = _family("gauge", "process_open_fds", "descriptors", "Open file descriptors of the process.", "process")
PROCESS_START = _family(
    "gauge", "process_start_time_seconds", "seconds", "Start time of the process, as Unix time.", "process"
)

# --- GPUs: as NVML gives them when the port is read ---

_GPU_LABELS = ("gpu", "uuid")

GPU_UTILIZATION = _family(
    "gauge",
    "trtx_gpu_utilization_ratio",
    "share",
    "Share of NVML's last sample period in which a kernel ran.",
    *_GPU_LABELS,
    when=_GPU,
)
GPU_SM_CLOCK = _family(
    "gauge", "trtx_gpu_sm_clock_hertz", "hertz", "Current clock of the multiprocessors.", *_GPU_LABELS, when=_GPU
)
GPU_MAX_SM_CLOCK = _family(
    "gauge", "trtx_gpu_max_sm_clock_hertz", "hertz", "Highest clock of the multiprocessors.", *_GPU_LABELS, when=_GPU
)
GPU_MEMORY_CLOCK = _family(
    "gauge", "trtx_gpu_memory_clock_hertz", "hertz", "Current clock of the memory.", *_GPU_LABELS, when=_GPU
)
GPU_POWER = _family("gauge", "trtx_gpu_power_watts", "watts", "Power draw of the board.", *_GPU_LABELS, when=_GPU)
GPU_ENERGY = _family(
    "counter",
    "trtx_gpu_energy_joules_total",
    "joules",
    "Energy since the driver was loaded.",
    *_GPU_LABELS,
    when=_GPU,
)
GPU_TEMPERATURE = _family(
    "gauge", "trtx_gpu_temperature_celsius", "celsius", "Temperature of the GPU.", *_GPU_LABELS, when=_GPU
)
GPU_MEMORY_USED = _family(
    "gauge", "trtx_gpu_memory_used_bytes", "bytes", "Used memory, by all processes.", *_GPU_LABELS, when=_GPU
)
GPU_MEMORY_TOTAL = _family(
    "gauge", "trtx_gpu_memory_total_bytes", "bytes", "Memory of the GPU.", *_GPU_LABELS, when=_GPU
)
GPU_ECC_ERRORS = _family(
    "counter",
    "trtx_gpu_ecc_errors_total",
    "errors",
    "Memory errors since the driver was loaded, corrected or uncorrected.",
    *_GPU_LABELS,
    "type",
    when=_GPU,
)
GPU_CLOCK_REASON = _family(
    "gauge",
    "trtx_gpu_clock_reason",
    "boolean",
    "1 if this reason now keeps the clocks below their maximum, else 0.",
    *_GPU_LABELS,
    "reason",
    when=_GPU,
)
GPU_NVLINK_BYTES = _family(
    "counter",
    "trtx_gpu_nvlink_bytes_total",
    "bytes",
    "Data over all NVLinks of the GPU, by direction: sent or received.",
    *_GPU_LABELS,
    "direction",
    when=_GPU,
)
