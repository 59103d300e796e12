"""Metric families of the KV cache and of handoffs."""

from __future__ import annotations

from functools import partial

from trtx.engine.served_family import TEXT_ROLES, ServedFamily, Server, recorded

_STEPS = "once the engine reports iteration statistics"
_HANDOFF: tuple[Server, ...] = ("prefill", "decode")
_COUNTED = "if the engine counts handoffs"

FAMILIES: dict[str, ServedFamily] = {}
_family = partial(recorded, FAMILIES)

# --- KV cache ---

KV_BLOCKS = _family(
    "gauge",
    "trtx_kv_blocks",
    "blocks",
    "KV blocks in the pool. Tier gpu is the pool that steps read, also on a worker without a GPU; tier host is host "
    "memory.",
    "tier",
    by=TEXT_ROLES,
    when="if the engine has a KV pool",
)
KV_BLOCKS_USED = _family(
    "gauge",
    "trtx_kv_blocks_used",
    "blocks",
    "KV blocks that requests and leases hold; in tier host, blocks that are not empty.",
    "tier",
    by=TEXT_ROLES,
    when="if the engine has a KV pool",
)
KV_HIT_RATE = _family(
    "gauge",
    "trtx_kv_hit_rate",
    "share",
    "Share of prompt blocks found in the prefix cache, since the worker's start; in tier host, of those that tier gpu "
    "lacks.",
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
_HOST = "with host_cache_size"
KV_TIER_BYTES = _family(
    "counter",
    "trtx_kv_tier_bytes_total",
    "bytes",
    "KV copied to host memory (stored) and back (loaded), by all GPUs of the worker.",
    "direction",
    by=TEXT_ROLES,
    when=_HOST,
)
KV_TIER_SECONDS = _family(
    "counter",
    "trtx_kv_tier_seconds_total",
    "seconds",
    "Duration of the copies that trtx_kv_tier_bytes_total counts, on the slowest GPU of the worker.",
    "direction",
    by=TEXT_ROLES,
    when=_HOST,
)
LOST_KV_EVENTS = _family(
    "counter", "trtx_lost_kv_events_total", "events", "KV events that the engine dropped before they were read."
)

# --- handoff ---

WHOLE_REQUESTS = _family(
    "counter",
    "trtx_whole_requests_total",
    "requests",
    "Requests that a decode worker served without a handoff, though a prefill worker should have had them.",
    by=_HANDOFF,
)
LOCAL_PREFILLS = _family(
    "counter",
    "trtx_local_prefills_total",
    "requests",
    "Requests that the router sent to a decode worker alone (--conditional-disagg).",
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
