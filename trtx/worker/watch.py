"""Background watches of a worker: the engine's health, memory and processes, and the handoff counts."""

from __future__ import annotations

import asyncio
import logging
import os
import time

from trtx.engine.ranks import Rank, descendants
from trtx.worker.loading import LoadedEngine
from trtx.worker.metrics import WorkerMetrics
from trtx.worker.status import StatusFile
from trtx.worker.transfers import TransferCounts

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 0.25
"""Interval of health checks: the longest delay until an engine's death is noticed."""
HEALTH_TIMEOUT_SECONDS = 30.0
"""Timeout of one health check, after which the engine counts as dead; as in Dynamo's TensorRT-LLM backend."""
RANKS_SECONDS = 1.0
"""The longest delay until a process that the engine started is recorded."""
HANDOFFS_SECONDS = 1.0
"""Interval of handoff reports to the launcher: at most one file write a second, however many handoffs there are."""


async def watch_ranks(status: StatusFile) -> None:
    """Keeps ``ranks`` in the status file up to date, and the file in place.

    Runs from before the load on: a load that fails may leave ranks behind too.
    """
    ranks: tuple[Rank, ...] = ()
    while True:
        found = await asyncio.to_thread(descendants, os.getpid())
        if found != ranks:
            ranks = found
            status.update(ranks=ranks)
        status.keep()
        await asyncio.sleep(RANKS_SECONDS)


async def watch_handoffs(status: StatusFile, transfers: TransferCounts) -> None:
    """Keeps ``handoffs`` in the status file up to date, or null if the engine does not report transfers."""
    while True:
        found = transfers.so_far() if transfers.is_known else None
        if found != status.status.handoffs:
            status.update(handoffs=found)
        await asyncio.sleep(HANDOFFS_SECONDS)


async def until_death(loaded: LoadedEngine, status: StatusFile, metrics: WorkerMetrics, *, stall_seconds: float) -> str:
    """Returns once the engine is dead, with the cause if the engine reports one.

    Keeps ``device_memory_bytes`` up to date. An engine type that a lost message can stall (``dies_of_stalls``) also
    counts as dead if it takes no step for ``stall_seconds`` while requests are open.
    """
    seen, since = (0, 0), time.monotonic()
    while await _is_healthy(loaded):
        memory = loaded.engine.device_memory_bytes(metrics.iterations.values())
        if memory != status.status.device_memory_bytes:
            status.update(device_memory_bytes=memory)
        steps = sum(int(row.get("iter") or 0) for row in metrics.iterations.values())
        if not metrics.open_requests or (metrics.generated_tokens, steps) != seen:
            seen, since = (metrics.generated_tokens, steps), time.monotonic()
        elif loaded.api.dies_of_stalls and time.monotonic() - since > stall_seconds:
            return f"no step in {stall_seconds:g} s with {metrics.open_requests} requests open"
        await asyncio.sleep(HEALTH_SECONDS)
    return loaded.engine.cause_of_death()


async def _is_healthy(loaded: LoadedEngine) -> bool:
    try:
        return await asyncio.wait_for(asyncio.to_thread(loaded.engine.is_alive), HEALTH_TIMEOUT_SECONDS)
    except Exception as error:
        logger.error("the engine's health can't be read: %r", error)
        return False
