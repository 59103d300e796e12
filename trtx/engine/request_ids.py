"""Global ids for requests that two engines share, for engines that bring no maker of their own."""

from __future__ import annotations

import threading
import time


class RequestIds:
    """Made before prefill, in the layout of TensorRT-LLM 1.3.0rc22's ``get_global_disagg_request_id``: 39 bits of
    milliseconds, 14 of process, 10 of counter.

    Ids below 2**40 are an engine's own. The milliseconds start again from 0 every 17.4 years, next in September 2039,
    and only in the 65 s after that are ids so small.
    """

    def __init__(self, worker_id: int) -> None:
        self._process = worker_id % (1 << 14)
        self._count = 0
        self._lock = threading.Lock()

    def next(self) -> int:
        with self._lock:
            self._count = (self._count + 1) % (1 << 10)
            milliseconds = int(time.time() * 1000) % (1 << 39)
            return (milliseconds << 24) | (self._process << 10) | self._count
