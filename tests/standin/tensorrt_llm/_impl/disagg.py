"""What travels between a prefill and a decode engine, and the ids that both use."""

from __future__ import annotations

import threading
import time
from typing import Any

from tensorrt_llm._facts import dataclass, enumeration, follows

REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")
MIN_GLOBAL_ID = 1 << 40
"""Ids below are an engine's own."""

DisaggScheduleStyle = enumeration("DisaggScheduleStyle")


def _check(self: Any) -> None:
    if self.request_type is not None:
        self.request_type = self.request_type.lower()
        if self.request_type not in REQUEST_TYPES:
            raise ValueError(f"Unknown request type: {self.request_type}. Must be one of {', '.join(REQUEST_TYPES)}")
    if self.multimodal_embedding_handles is not None and self.multimodal_hashes is not None:
        assert len(self.multimodal_embedding_handles) == len(self.multimodal_hashes), (
            "multimodal_embedding_handles and multimodal_hashes must have the same length"
        )
        for mm_hash in self.multimodal_hashes:
            is_hash = isinstance(mm_hash, list) and len(mm_hash) == 8 and all(isinstance(x, int) for x in mm_hash)
            assert is_hash, "mm_hash must be a list of 8 integers"


DisaggregatedParams = dataclass("DisaggregatedParams", {"__post_init__": _check})

_lock = threading.Lock()
_counter = 0


@follows("get_global_disagg_request_id")
def get_global_disagg_request_id(node_id: int = 0, process_id: int = 0, machine_id: int | None = None) -> int:
    """A positive 64-bit id: 39 bits of milliseconds, 14 of who made it, 10 of a counter.

    Who made it: 8 bits of node and 6 of process, up to 1.3.0rc21 10 bits of machine with 12 of a counter.
    """
    global _counter
    milliseconds = int(time.time() * 1000)
    with _lock:
        _counter += 1
        count = _counter
    if machine_id is not None:
        if not 0 <= machine_id < 1 << 10:
            raise ValueError(f"machine_id must be in range [0, {1 << 10})")
        made = (milliseconds & (1 << 41) - 1) << 22 | machine_id << 12 | count % (1 << 12)
    else:
        for name, value, limit in (("node_id", node_id, 1 << 8), ("process_id", process_id, 1 << 6)):
            if not 0 <= value < limit:
                raise ValueError(f"{name} must be in range [0, {limit})")
        made = (milliseconds & (1 << 39) - 1) << 24 | node_id << 16 | process_id << 10 | count % (1 << 10)
    return made if made >= MIN_GLOBAL_ID else made + MIN_GLOBAL_ID


get_global_disagg_request_id.__module__ = "tensorrt_llm.llmapi.disagg_utils"
