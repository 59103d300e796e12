"""One row of iteration statistics, with the keys of TensorRT-LLM's ``get_stats``."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from trtx.torch_engine.core.grammars import GrammarCounts
from trtx.torch_engine.core.host_tier import HostTier
from trtx.torch_engine.core.scheduled_step import Step
from trtx.torch_engine.core.scheduler import Scheduler
from trtx.torch_engine.core.sequence import Sequence
from trtx.torch_engine.core.speculation.speculation import SpeculationCounts
from trtx.torch_engine.step import ExpertBalance


def iteration_stats(
    scheduler: Scheduler,
    step: Step,
    *,
    iteration: int,
    began: float,
    ended: float,
    num_completed: int,
    num_emitted: int,
    cpu_memory_bytes: int,
    device_memory_bytes: int,
    device_wait_s: float | None,
    num_graph_misses: int | None,
    grammars: GrammarCounts | None,
    speculation: SpeculationCounts | None = None,
    experts: ExpertBalance | None = None,
) -> dict[str, Any]:
    """Returns a row of counts as of the end of the step; the next step may be in flight.

    Times are in ms, memory in bytes. ``began``, ``ended``: seconds on the clock of ``Sequence.arrived_s``. If a step
    waited for the previous step, ``began`` is the time at which that one was committed. Block counts are in units of
    one block in every KV cache group, i.e. of all layers.

    TensorRT-LLM lacks ``numPreemptions``, ``deviceWaitMS``, ``numGraphMisses``, ``guidedDecodingStats``,
    ``expertStats`` and ``hostKvCacheStats``. If an argument is None, the row lacks its field.
    """
    decodes, prompts = step.generating, step.prompts
    fresh = [s for s in step.admitted if not s.is_resumed]
    new, handed_off, paused = _split(scheduler.waiting)
    row: dict[str, Any] = {
        "iter": iteration,
        "iterLatencyMS": (ended - began) * 1e3,
        "cpuMemUsage": cpu_memory_bytes,
        "gpuMemUsage": device_memory_bytes,
        "numActiveRequests": scheduler.num_active,
        "numQueuedRequests": len(scheduler.waiting),
        "numCompletedRequests": num_completed,
        "numNewActiveRequests": len(fresh),
        "newActiveRequestsQueueLatencyMS": sum(began - s.arrived_s for s in fresh) / len(fresh) * 1e3 if fresh else 0.0,
        "maxNumActiveRequests": scheduler.max_batch_size,
        "maxBatchSizeStatic": scheduler.max_batch_size,
        "maxBatchSizeRuntime": scheduler.max_batch_size,
        "maxNumTokensRuntime": scheduler.limits.max_num_tokens,
        "attentionDpRank": 0,
        "numPreemptions": scheduler.num_preemptions,
        "kvCacheStats": _kv_cache_stats(scheduler),
        "inflightBatchingStats": {
            "numScheduledRequests": len(step.sequences),
            "numContextRequests": len(prompts),
            "numGenRequests": len(decodes),
            "numPausedRequests": len(paused),
            "numCtxTokens": step.num_context_tokens,
            "microBatchId": 0,
            "avgNumDecodedTokensPerIter": num_emitted / len(step.sequences) if step.sequences else 0.0,
            "numCtxKvTokens": sum(s.num_written for s in prompts),
            "numGenKvTokens": sum(s.num_written for s in decodes),
            "numQueuedContextRequests": len(new),
            "numQueuedCtxTokens": sum(s.num_tokens for s in new),
            "numQueuedGenRequests": len(handed_off),
            "numQueuedGenKvTokens": sum(s.num_tokens for s in handed_off),
            "numPausedKvTokens": sum(s.num_tokens for s in paused),
        },
    }
    if scheduler.prefixes.tier is not None:
        row["hostKvCacheStats"] = _host_cache_stats(scheduler.prefixes.tier, scheduler.groups.count)
    if device_wait_s is not None:
        row["deviceWaitMS"] = device_wait_s * 1e3
    if num_graph_misses is not None:
        row["numGraphMisses"] = num_graph_misses
    if grammars is not None:
        row["guidedDecodingStats"] = _guided_decoding_stats(grammars)
    if experts is not None:
        row["expertStats"] = {
            "numRoutedTokens": experts.tokens,
            "expertImbalance": experts.busiest_expert,
            "rankImbalance": experts.busiest_rank,
        }
    if speculation is not None:
        row["specDecodingStats"] = _spec_decoding_stats(speculation, (ended - began) * 1e3)
    return row


def _spec_decoding_stats(counts: SpeculationCounts, iteration_ms: float) -> dict[str, Any]:
    """TensorRT-LLM's statistics for one step; ``iterLatencyMS`` is the time spent on drafting.

    TensorRT-LLM lacks the two counts by position in the draft. ``acceptanceLength`` is None in a step without drafts.
    """
    drafting_ms = counts.drafting_s * 1e3
    return {
        "numDraftTokens": sum(counts.drafted),
        "numAcceptedTokens": sum(counts.accepted),
        "numRequestsWithDraftTokens": counts.drafts,
        "acceptanceLength": counts.acceptance_length,
        "iterLatencyMS": drafting_ms,
        "draftOverhead": drafting_ms / iteration_ms if iteration_ms else 0.0,
        "numDraftTokensByPosition": counts.drafted,
        "numAcceptedTokensByPosition": counts.accepted,
    }


def _guided_decoding_stats(grammars: GrammarCounts) -> dict[str, int]:
    return {"numCompiled": grammars.compiled, "numReused": grammars.reused, "numCached": grammars.cached}


def since_the_step(row: dict[str, Any], scheduler: Scheduler) -> dict[str, Any] | None:
    """Returns the last step's row again with current block usage, or None if the usage is unchanged.

    Leases and reads end without a step, so without this row the change would stay unreported until the next step.
    """
    cache = _kv_cache_stats(scheduler)
    if cache["usedNumBlocks"] == row["kvCacheStats"]["usedNumBlocks"]:
        return None
    tier = scheduler.prefixes.tier
    return {
        **row,
        **({"hostKvCacheStats": _host_cache_stats(tier, scheduler.groups.count)} if tier is not None else {}),
        "numActiveRequests": scheduler.num_active,
        "numQueuedRequests": len(scheduler.waiting),
        "numCompletedRequests": 0,  # already reported, as are the new requests
        "numNewActiveRequests": 0,
        "kvCacheStats": cache,
    }


def _kv_cache_stats(scheduler: Scheduler) -> dict[str, Any]:
    groups = scheduler.groups.count
    pool, counters = scheduler.pool, scheduler.pool.counters
    return {
        "maxNumBlocks": pool.num_blocks // groups,
        "freeNumBlocks": pool.num_available // groups,
        "usedNumBlocks": pool.num_blocks // groups - pool.num_available // groups,
        "tokensPerBlock": pool.tokens_per_block,
        "allocTotalBlocks": counters.allocated // groups,
        "allocNewBlocks": counters.allocated_new // groups,
        "reusedBlocks": counters.reused // groups,
        "missedBlocks": counters.missed // groups,
        "cacheHitRate": counters.hit_rate,
    }


def _host_cache_stats(tier: HostTier, groups: int) -> dict[str, Any]:
    """Totals since the start, like those of ``kvCacheStats``, for the prompt blocks that the device does not have."""
    counters = tier.counters
    return {
        "maxNumBlocks": tier.pool.num_blocks // groups,
        "usedNumBlocks": tier.num_used // groups,
        "reusedBlocks": counters.hits // groups,
        "missedBlocks": counters.missed // groups,
        "cacheHitRate": counters.hit_rate,
        "storedBytes": counters.stored * tier.block_bytes,
        "loadedBytes": counters.loaded * tier.block_bytes,
        "storeSeconds": counters.stored_seconds,
        "loadSeconds": counters.loaded_seconds,
        "evictedBlocks": counters.evicted // groups,
        "droppedBlocks": counters.dropped // groups,
        "abandonedLoads": counters.abandoned_loads,
    }


def _split(waiting: SequenceOf[Sequence]) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
    """Splits waiting sequences into those with a prompt to compute, those handed off, and preempted ones."""
    new: list[Sequence] = []
    handed_off: list[Sequence] = []
    paused: list[Sequence] = []
    for sequence in waiting:
        if sequence.wants_read:
            handed_off.append(sequence)
        else:
            (paused if sequence.is_resumed else new).append(sequence)
    return new, handed_off, paused
