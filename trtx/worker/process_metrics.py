"""Memory, CPU time and file descriptors of a worker's processes, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from trtx.worker.served_families import gpu_and_process_families


def process_families(pids: Mapping[str, int]) -> Iterator[Any]:
    """The families of these processes, by their names. A process that has ended has no samples."""
    memory, cpu, descriptors, started = [], [], [], []
    for name, pid in pids.items():
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                resident, times, begun = process.memory_info().rss, process.cpu_times(), process.create_time()
            memory.append(((name,), float(resident)))
            cpu.append(((name,), times.user + times.system))
            started.append(((name,), begun))
            descriptors.append(((name,), float(process.num_fds())))
        except psutil.Error:
            continue
    yield gpu_and_process_families.PROCESS_MEMORY.family(memory)
    yield gpu_and_process_families.PROCESS_CPU.family(cpu)
    yield gpu_and_process_families.PROCESS_FDS.family(descriptors)
    yield gpu_and_process_families.PROCESS_START.family(started)
