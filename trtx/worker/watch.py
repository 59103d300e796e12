"""What a worker keeps an eye on beside its requests: the engine's health, its memory, and the processes it started."""

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
"""How late the death of the engine is noticed."""
HEALTH_TIMEOUT_SECONDS = 30.0
"""An engine that takes longer to say how it is, is dead; Dynamo's TensorRT-LLM backend waits as long."""
RANKS_SECONDS = 1.0
"""How late a process that the engine starts is recorded."""
HANDOFFS_SECONDS = 1.0
"""How late a handoff is told to the launcher: a file a second at most, however many there are."""


async def watch_ranks(status: StatusFile) -> None:
    """Keeps the status file there and its ``ranks`` true. From before the load on: one that fails may leave ranks
    behind too."""
    ranks: tuple[Rank, ...] = ()
    while True:
        found = await asyncio.to_thread(descendants, os.getpid())
        if found != ranks:
            ranks = found
            status.update(ranks=ranks)
        status.keep()
        await asyncio.sleep(RANKS_SECONDS)


async def watch_handoffs(status: StatusFile, transfers: TransferCounts) -> None:
    """Keeps the ``handoffs`` of the status file true, for as long as the engine says what becomes of each."""
    while True:
        found = transfers.so_far() if transfers.is_known else None
        if found != status.status.handoffs:
            status.update(handoffs=found)
        await asyncio.sleep(HANDOFFS_SECONDS)


async def until_death(loaded: LoadedEngine, status: StatusFile, metrics: WorkerMetrics, *, stall_seconds: float) -> str:
    """Returns when the engine is dead, with what it died of, if it says so. Keeps ``device_memory_bytes`` true.

    Dead is also one of those that a lost message can stall, when it takes no step for ``stall_seconds`` while requests
    are open.
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
        logger.error("the engine's health can't be asked: %r", error)
        return False
