"""Places workers on CPU cores: each on cores of its GPU's NUMA node, shared among the workers of that node. Pure.

A worker that moves between nodes reads its memory and its GPU across the link between them. Frontends stay free to run
on every core.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trtx.topology.machine import Gpu, Machine, NumaNode

LEAST_CORES = 4
"""Physical cores below which a worker is not placed: its engine, its event loop and its decoders run at once."""


@dataclass(frozen=True, slots=True)
class CorePlacement:
    """The CPUs of each worker, in the order of the workers, and a reason for each; no CPUs: it may run on all."""

    cpus: tuple[tuple[int, ...], ...]
    reasons: tuple[str, ...]


def place_on_cores(machine: Machine, names: Sequence[str], gpus: Sequence[tuple[Gpu, ...]]) -> CorePlacement:
    """Places the workers ``names``, which have the GPUs ``gpus``, for ``--worker-cores auto``."""
    everywhere = tuple(() for _ in names)
    if because := _why_not(machine, len(names)):
        return CorePlacement(everywhere, (f"--worker-cores auto leaves workers on all cores, because {because}",))
    nodes = {node.index: node for node in machine.numa_nodes}
    homes = [_home(one, number, nodes) for number, one in enumerate(gpus)]
    fewest = min(len(nodes[home].cores) // homes.count(home) for home in homes)
    if fewest < LEAST_CORES:
        because = f"a worker would have {fewest} cores of its NUMA node, and needs {LEAST_CORES}"
        return CorePlacement(everywhere, (f"--worker-cores auto leaves workers on all cores, because {because}",))
    placed = list(_shares(homes, nodes))
    reasons = [
        f"{name} on CPUs {cpu_ranges(cpus)} of NUMA node {home}{' of its GPU' if group else ''} because of "
        "--worker-cores auto"
        for name, cpus, home, group in zip(names, placed, homes, gpus, strict=True)
    ]
    return CorePlacement(tuple(placed), tuple(reasons))


def _why_not(machine: Machine, workers: int) -> str:
    if machine.cores_taken:
        return machine.cores_taken
    if len(machine.numa_nodes) < 2 and workers < 2:
        return "this machine has one NUMA node and one worker"
    return "" if machine.numa_nodes else "the cores of this machine are not known"


def _home(gpus: tuple[Gpu, ...], number: int, nodes: dict[int, NumaNode]) -> int:
    """The NUMA node of a worker's first GPU; without one, the nodes take turns."""
    known = next((gpu.numa_node for gpu in gpus if gpu.numa_node in nodes), None)
    return sorted(nodes)[number % len(nodes)] if known is None else known


def _shares(homes: Sequence[int], nodes: dict[int, NumaNode]) -> Iterator[tuple[int, ...]]:
    """The CPUs of each worker: adjacent whole cores, an equal number for all workers of a node."""
    seen: dict[int, int] = defaultdict(int)
    for home in homes:
        cores, workers = nodes[home].cores, homes.count(home)
        begin, end = (len(cores) * (seen[home] + more) // workers for more in (0, 1))
        seen[home] += 1
        yield tuple(sorted(cpu for core in cores[begin:end] for cpu in core))


def cpu_ranges(cpus: Sequence[int]) -> str:
    """CPUs as ranges, such as ``0-15,64-79``."""
    ranges: list[list[int]] = []
    for cpu in cpus:
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
