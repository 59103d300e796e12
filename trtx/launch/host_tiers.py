"""The host memory that the KV caches of a topology's workers take, checked before anything starts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trtx.engine.tensorrt_llm.arguments import world_size
from trtx.errors import UsageError
from trtx.memory import MemoryPlan, host_memory, size_text
from trtx.memory.host import host_cache_too_small
from trtx.topology import Plan


def with_host_tiers(plan: Plan) -> Plan:
    """``plan`` with a reason for each role that keeps KV in host memory: each GPU of its workers has its own.

    Raises UsageError if the workers of this machine want more than it can give. On other hosts each engine checks its
    own share.
    """
    counts = Counter[str](worker.role for worker in plan.workers)
    sizes = {
        role: counts[role] * world_size(values) * ((values.get("kv_cache_config") or {}).get("host_cache_size") or 0)
        for role, values in plan.engine_configs.items()
        if role != "encode"
    }
    total = sum(sizes.values())
    if not total:
        return plan
    available = host_memory().available
    if available is not None and total > available and not any(worker.host for worker in plan.workers):
        raise UsageError(
            f"kv_cache_config.host_cache_size of all workers is {size_text(total)} together, and this machine, or "
            f"this container, can give {size_text(available)} of memory; lower it, or start fewer workers"
        )
    reasons = tuple(
        f"{role}: {size_text(size)} of host memory for KV because of kv_cache_config.host_cache_size"
        for role, size in sizes.items()
        if size
    )
    return replace(plan, reasons=(*plan.reasons, *reasons))


def check_host_tier(values: Mapping[str, Any], memory: MemoryPlan) -> None:
    """Raises UsageError, as the torch engine would, for less than one block of each KV cache group."""
    size = (values.get("kv_cache_config") or {}).get("host_cache_size") or 0
    needed = math.ceil(memory.kv_bytes_per_token * memory.tokens_per_block)
    if size and (problem := host_cache_too_small(size, needed, 1)) is not None:
        raise UsageError(problem)
