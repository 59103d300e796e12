"""Reads this machine's CPU cores: their NUMA nodes, the threads of each core, and restrictions by the caller."""

from __future__ import annotations

import math
import os
from pathlib import Path

from trtx.topology import NumaNode

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_SYSTEM = Path("/sys/devices/system")


def cpu_cores() -> int:
    """Number of CPUs that this process may use, from its affinity and its cgroup's quota."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores if (quota := _quota()) is None else min(cores, math.ceil(quota)))


def cores_taken(system: Path = _SYSTEM) -> str:
    """Returns why trtx must not pin processes to cores, such as a cgroup that limits the CPUs; "" if it may."""
    if _quota() is not None:
        return "the cgroup limits the CPU time"
    online = cpus_of(_read(system / "cpu" / "online"))
    if online and os.sched_getaffinity(0) != set(online):
        return "a cgroup, taskset or numactl has chosen the cores"
    return ""


def numa_nodes(system: Path = _SYSTEM) -> tuple[NumaNode, ...]:
    """The NUMA nodes with the CPUs of each core. Empty if the system does not say."""
    found = []
    for directory in sorted((system / "node").glob("node[0-9]*"), key=lambda one: int(one.name.removeprefix("node"))):
        cpus = cpus_of(_read(directory / "cpulist"))
        siblings = (cpus_of(_read(system / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list")) for cpu in cpus)
        cores = tuple(dict.fromkeys(one or (cpu,) for cpu, one in zip(cpus, siblings, strict=True)))
        if cores:  # a node may have memory alone
            found.append(NumaNode(int(directory.name.removeprefix("node")), cores))
    return tuple(found)


def numa_node_of(bus_id: str, system: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node of a PCI device, as NVML spells its address; None if the system does not say."""
    domain, _, rest = bus_id.lower().partition(":")
    text = _read(system / f"{domain[-4:]}:{rest}" / "numa_node")
    return int(text) if text.isdecimal() else None


def cpus_of(text: str) -> tuple[int, ...]:
    """Parses a list of CPUs such as ``0-3,8``."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.strip().isdecimal():
            found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _quota() -> float | None:
    """The CPUs that the cgroup's quota allows; None without a quota."""
    text = _read(_CGROUP_QUOTA).split()
    return int(text[0]) / int(text[1]) if len(text) == 2 and text[0].isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
