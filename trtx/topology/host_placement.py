"""Assigns workers to hosts and their GPUs: a pure function of the hosts' resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtx.config import Role
from trtx.config.hosts import HostSpec
from trtx.config.wording import with_article
from trtx.errors import UsageError
from trtx.topology.workers import Worker


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """A worker, its host, and its GPUs as that host numbers them; no GPUs: it computes on the CPU."""

    worker: Worker
    host: str
    gpus: tuple[int, ...]


def place_on_hosts(hosts: Sequence[HostSpec], workers: Sequence[Worker]) -> list[WorkerPlacement]:
    """Host and GPUs of each worker, in the order of ``workers``.

    If the hosts file states roles, the workers of a role are assigned in the order of the hosts. Otherwise workers with
    the same number, such as a prefill and a decode worker, go to one host if it has room for both, so that their KV
    goes over NVLink. Each such unit goes to the host with the most free GPUs, so that hosts are loaded evenly. On a
    host, GPUs are taken in the order of the hosts file. Raises UsageError if a host has too few GPUs, or if no
    placement on all of them exists.
    """
    sizes = {worker.role: worker.gpu_count for worker in workers}
    if any(host.roles for host in hosts):
        dealt = _by_roles(hosts, workers)
    elif any(host.gpu_indices for host in hosts):
        dealt = _by_room(hosts, workers, sizes)
    else:
        dealt = _by_count(hosts, workers)
    return _with_gpus(hosts, workers, dealt)


def _by_roles(hosts: Sequence[HostSpec], workers: Sequence[Worker]) -> dict[str, str]:
    """Worker name -> host, by the roles in the hosts file."""
    dealt: dict[str, str] = {}
    for role in {worker.role: None for worker in workers}:
        seats = [host.name for host in hosts for _ in range((host.roles or {}).get(role, 0))]
        names = [worker.name for worker in workers if worker.role == role]
        dealt |= dict(zip(names, seats, strict=True))
    return dealt


def _by_count(hosts: Sequence[HostSpec], workers: Sequence[Worker]) -> dict[str, str]:
    """Worker name -> host without GPUs: evenly over the hosts, because nothing states their capacity."""
    loads = {host.name: 0 for host in hosts}
    dealt: dict[str, str] = {}
    for unit in _units(workers):
        name = min(loads, key=lambda one: loads[one])
        loads[name] += len(unit)
        dealt |= {worker.name: name for worker in unit}
    return dealt


def _by_room(hosts: Sequence[HostSpec], workers: Sequence[Worker], sizes: Mapping[Role, int]) -> dict[str, str]:
    rooms = {host.name: len(host.gpu_indices) for host in hosts}
    dealt: dict[str, str] = {}

    def take(unit: Sequence[Worker]) -> bool:
        needed = sum(worker.gpu_count for worker in unit)
        name = max(rooms, key=lambda one: rooms[one])  # ties go to the first host
        if rooms[name] < needed:
            return False
        rooms[name] -= needed
        dealt.update({worker.name: name for worker in unit})
        return True

    for unit in _units(workers):
        if not take(unit) and not all(take([worker]) for worker in sorted(unit, key=lambda one: -one.gpu_count)):
            return _packed(hosts, workers, sizes)
    return dealt


def _packed(hosts: Sequence[HostSpec], workers: Sequence[Worker], sizes: Mapping[Role, int]) -> dict[str, str]:
    """A placement found by exhaustive search over every host's share; used if the even distribution does not fit.

    Raises UsageError if there is none.
    """
    roles = list(sizes)
    counts = tuple(sum(worker.role == role for worker in workers) for role in roles)
    # Number of placed workers per role -> number per role on the last host.
    reached: list[dict[tuple[int, ...], tuple[int, ...]]] = [{(0,) * len(roles): ()}]
    for host in hosts:
        now: dict[tuple[int, ...], tuple[int, ...]] = {}
        for placed in reached[-1]:
            left = tuple(count - there for count, there in zip(counts, placed, strict=True))
            for took in _shares(left, [sizes[role] for role in roles], len(host.gpu_indices)):
                now.setdefault(tuple(a + b for a, b in zip(placed, took, strict=True)), took)
        reached.append(now)
    if counts not in reached[-1]:
        raise UsageError(_no_room(hosts, workers, sizes))
    shares: list[tuple[int, ...]] = []
    at = counts
    for now in reversed(reached[1:]):
        shares.append(now[at])
        at = tuple(a - b for a, b in zip(at, now[at], strict=True))
    placed_hosts = [
        host.model_copy(update={"roles": dict(zip(roles, share, strict=True))})
        for host, share in zip(hosts, reversed(shares), strict=True)
    ]
    return _by_roles(placed_hosts, workers)


def _shares(left: tuple[int, ...], sizes: Sequence[int], room: int) -> list[tuple[int, ...]]:
    """All combinations of workers per role that fit on a host with ``room`` GPUs."""
    if not left:
        return [()]
    most = min(left[0], room // sizes[0])
    return [
        (first, *rest) for first in range(most + 1) for rest in _shares(left[1:], sizes[1:], room - first * sizes[0])
    ]


def _units(workers: Sequence[Worker]) -> list[list[Worker]]:
    """Groups of workers with the same number, such as prefill-0 and decode-0, whose handoff is cheapest on one host."""
    units: dict[str, list[Worker]] = {}
    for worker in workers:
        units.setdefault(worker.name.rpartition("-")[2], []).append(worker)
    return list(units.values())


def _with_gpus(hosts: Sequence[HostSpec], workers: Sequence[Worker], dealt: Mapping[str, str]) -> list[WorkerPlacement]:
    free = {host.name: list(host.gpu_indices) for host in hosts}
    has_gpus = {name: bool(indices) for name, indices in free.items()}
    placed = []
    for worker in workers:
        name = dealt[worker.name]
        count = worker.gpu_count if has_gpus[name] else 0
        if count > len(free[name]):
            host = next(host for host in hosts if host.name == name)
            needed = sum(one.gpu_count for one in workers if dealt[one.name] == name)
            raise UsageError(
                f"{name} has {len(host.gpu_indices)} GPUs, but its workers need {needed}; list more in gpus, or fewer "
                "workers in roles"
            )
        placed.append(WorkerPlacement(worker, name, tuple(free[name][:count])))
        del free[name][:count]
    return placed


def _no_room(hosts: Sequence[HostSpec], workers: Sequence[Worker], sizes: Mapping[Role, int]) -> str:
    largest = max(len(host.gpu_indices) for host in hosts)
    there = sum(len(host.gpu_indices) for host in hosts)
    needed = sum(worker.gpu_count for worker in workers)
    for role, size in sizes.items():
        if size > largest:
            return (
                f"{with_article(f'{role} worker')} needs {size} GPUs, but no host has more than {largest}; lower "
                "--tp, or run an engine over several nodes with trtx export slurm or kubernetes"
            )
    if needed > there:
        return f"{len(workers)} workers need {needed} GPUs, but the hosts have {there}; use fewer workers or more hosts"
    return (
        f"{len(workers)} workers need {needed} of the {there} GPUs, but their sizes don't fit on the hosts; "
        "lower --tp, or ask for fewer workers"
    )
