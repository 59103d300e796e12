"""Global ids for requests that two engines share, for engines that do not generate such ids themselves."""

from __future__ import annotations

import threading
import time


class RequestIds:
    """Generates ids before prefill, in the layout of TensorRT-LLM 1.3.0rc22's ``get_global_disagg_request_id``: 39 bits
    of milliseconds, 14 bits of process, 10 bits of counter.

    Ids below 2**40 are reserved for an engine's own requests. The milliseconds wrap around every 17.4 years, next in
    September 2039; only in the 65 s after that are ids below 2**40 generated.
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
