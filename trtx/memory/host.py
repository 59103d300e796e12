"""Host memory for the KV cache's host tier: how much this machine, or this container, can give. Imports no torch."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from trtx.memory.units import size_text

_FIELD = "kv_cache_config.host_cache_size"
_NO_LIMIT = 1 << 60  # cgroup v1 writes a huge number for "none"


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of host memory. None: unknown, or there is no limit."""

    free: int | None  # that this machine can still give
    limit: int | None  # of the container
    left: int | None  # below that limit
    locked: int | None  # ``ulimit -l``; CUDA's pinned memory does not count in it, but RDMA's registrations do

    @property
    def available(self) -> int | None:
        known = [value for value in (self.free, self.left) if value is not None]
        return min(known) if known else None


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Reads the limits. ``root``: where ``proc`` and ``sys`` are mounted."""
    free = _labelled(root / "proc/meminfo", "MemAvailable:")
    limit, used = _cgroup(root / "sys/fs/cgroup")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostMemory(
        free=None if free is None else free << 10,
        limit=limit,
        left=None if limit is None else max(0, limit - (used or 0)),
        locked=None if soft == resource.RLIM_INFINITY else soft,
    )


def _cgroup(folder: Path) -> tuple[int | None, int | None]:
    """Returns (limit, bytes in use that the kernel can't drop), of cgroup v2 or v1."""
    for limit, used, stat, cache in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        most = _number(folder / limit)
        if most is not None:
            current, droppable = _number(folder / used), _labelled(folder / stat, cache)
            return (most if most < _NO_LIMIT else None), (current or 0) - (droppable or 0)
    return None, None


def _labelled(path: Path, label: str) -> int | None:
    """Returns the number after ``label`` in a file of labelled numbers."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    words = (line.split() for line in lines)
    return next((int(line[1]) for line in words if len(line) > 1 and line[0] == label and line[1].isdigit()), None)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def host_cache_shortage(num_bytes: int, memory: HostMemory, ranks: int = 1) -> str | None:
    """Returns why this machine lacks the host memory for each of an engine's ranks, or None."""
    available = memory.available
    if available is None or num_bytes * ranks <= available:
        return None
    each = f" for each of {ranks} GPUs, {size_text(num_bytes * ranks)} together" if ranks > 1 else ""
    by_limit = memory.left is not None and available == memory.left
    whose = f"the container's limit of {size_text(memory.limit or 0)} leaves" if by_limit else "this machine has"
    return f"{_FIELD} is {size_text(num_bytes)}{each}, and {whose} {size_text(available)} of memory; lower it" + (
        ", or raise the container's memory limit" if by_limit else ""
    )


def host_cache_too_small(num_bytes: int, block_bytes: int, num_groups: int) -> str | None:
    """Returns why the tier could hold no content of a model with so many KV cache groups, or None."""
    needed = block_bytes * num_groups
    if num_bytes >= needed:
        return None
    each = f", one block of {block_bytes} bytes for each of its {num_groups} KV cache groups" if num_groups > 1 else ""
    return (
        f"{_FIELD} is {num_bytes} bytes, and the smallest host tier of this model has {needed} bytes{each}; "
        f"set it to {needed} or more, or to 0 for no host tier"
    )
