"""Takes readings of a topology during a measurement: GPUs through NVML, workers through their metrics, and CPU cores.

GPUs of an attached deployment can't be read. Its workers can be read only if they publish their metrics port, and if
the metrics at that address name the published worker. Behind a port forwarder, the same port on this machine's loopback
may belong to another process.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from trtx.bench import ForeignProcess, GpuReading, ServerReading, Target
from trtx.bench.draft_counters import DraftCounts
from trtx.bench.handoffs import HandoffCounts
from trtx.bench.image_counters import ImageCounts
from trtx.doctor import GpuProcess, GpuState, open_gpus
from trtx.engine import worker_facts
from trtx.experiment.cpu_readings import CpuReader
from trtx.experiment.worker_counters import LABEL, draft_counts, handoff_counts, image_counts
from trtx.planes.registry import Instance, read_instance
from trtx.tls import trust_of
from trtx.topology import Plan, is_loopback

Read = Callable[[], ServerReading]

_LOOPBACK = "http://127.0.0.1"  # system ports never use TLS
_HEALTH = "/health"  # route of Dynamo's frontend that lists all routable instances
_TIMEOUT_S = 1.0  # a worker that doesn't answer within this time counts as not reporting
_ENDED = re.compile(rb"^trtx_requests_total\{([^}]*)\} ([0-9.e+]+)$", re.MULTILINE)
# Inode of the initial PID namespace: PROC_PID_INIT_INO in Linux's include/linux/proc_ns.h.
_HOST_PIDS = 0xEFFFFFFC


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Identity of a worker, from the labels that Dynamo adds to its metrics. A restarted worker has a new identity."""

    namespace: str
    worker_id: int


@dataclass(frozen=True, slots=True)
class Metered:
    """A worker whose metrics can be read."""

    name: str
    role: str
    url: str  # of its system port
    identity: WorkerIdentity | None = None  # None: a worker of trtx, which restarts it at the same address


@contextlib.contextmanager
def open_topology(plan: Plan) -> Iterator[Read]:
    """Yields a function that takes readings of the topology of ``plan``."""
    gpus = _gpus_of(plan)
    metered = tuple(
        Metered(worker.name, worker.role, f"{_LOOPBACK}:{worker.system_port}")
        for worker in plan.workers
        if worker.system_port is not None
    )
    workers = metered if len(metered) == plan.worker_count else ()
    cpu = CpuReader()
    http = httpx.Client(timeout=_TIMEOUT_S, trust_env=False, verify=trust_of(_LOOPBACK))
    with open_gpus(tuple(gpus.values())) as read_gpus, http as client:

        def read() -> ServerReading:
            at_ns, cores = time.time_ns(), cpu.read()
            states = () if not gpus else None if read_gpus is None else read_gpus()
            sees_all = sees_host_pids()
            seen = (
                None
                if states is None
                else tuple(
                    gpu_reading(name, state, plan.namespace, sees_all) for name, state in zip(gpus, states, strict=True)
                )
            )
            return _with_counters(client, workers, ServerReading(at_ns, seen, None, cpu=cores))

        yield read


@contextlib.contextmanager
def open_attached(target: Target) -> Iterator[Read | None]:
    """Yields a function that reads an attached deployment's workers and this machine's cores; None if neither is
    readable.
    """
    with httpx.Client(timeout=_TIMEOUT_S, trust_env=False, verify=trust_of(target.url)) as client:
        workers = _published(client, target)
        cpu = cores_beside(target, workers)
        if not workers and cpu.read() is None:
            yield None
            return

        def read() -> ServerReading:
            at_ns, cores = time.time_ns(), cpu.read()
            return _with_counters(client, workers, ServerReading(at_ns, None, None, cpu=cores))

        yield read


def cores_beside(target: Target, workers: Sequence[Metered]) -> CpuReader:
    """A reader for the cores of this machine, which runs the client and, if the target's address is local, the
    deployment.
    """
    if not _is_here(urlsplit(target.url).hostname or ""):
        return CpuReader(scope="client")
    on_loopback = all(is_loopback(urlsplit(worker.url).hostname or "") for worker in workers)
    namespaces = {worker.identity.namespace for worker in workers if worker.identity is not None}
    # Without namespaces, the deployment's processes would count as foreign.
    return CpuReader(namespaces) if namespaces and on_loopback else CpuReader(scope="unknown")


def _is_here(host: str) -> bool:
    """Whether a host name refers to this machine: only local addresses can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False  # the load will report the error
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as tried:
            tried.bind(address)
            return True
    return False


def gpu_reading(name: str, state: GpuState, topology: str, sees_all: bool) -> GpuReading:
    """The reading of one GPU of ``topology``. ``sees_all``: all processes of the machine are visible."""
    return GpuReading(
        name=name,
        sm_clock_mhz=state.sm_clock_mhz,
        max_sm_clock_mhz=state.max_sm_clock_mhz,
        clock_reasons=state.clock_reasons,
        power_w=state.power_w,
        temperature_c=state.temperature_c,
        memory_used_bytes=state.memory_used_bytes,
        foreign=None if state.processes is None else foreign_of(state.processes, topology, sees_all),
        utilization_percent=state.utilization_percent,
        energy_j=None if state.energy is None else state.energy.joules,
        energy_at_ns=None if state.energy is None else state.energy.at_ns,
    )


def foreign_of(processes: Sequence[GpuProcess], topology: str, sees_all: bool) -> tuple[ForeignProcess, ...] | None:
    """The processes that don't belong to ``topology``; None if NVML's list can't be matched with visible processes.

    In a container, some drivers report the host's pids (nvidia-docker #1483) and others omit processes outside of it
    (NVIDIA's open kernel modules). A list without any process of the topology, or with pids that don't exist here, is
    therefore unusable. An empty result is conclusive only if all processes of the machine are visible.
    """
    if not any(process.topology == topology for process in processes):
        return None
    if not sees_all and any(process.name is None for process in processes):
        return None
    found = tuple(
        ForeignProcess(process.pid, process.name, process.sm_percent)
        for process in processes
        if process.topology != topology
    )
    return found if found or sees_all else None


def sees_host_pids(root: Path = Path("/")) -> bool:
    """Whether this process is in the initial PID namespace, which is not the case in a container without --pid=host."""
    try:
        return (root / "proc" / "self" / "ns" / "pid").stat().st_ino == _HOST_PIDS
    except OSError:
        return False


def _with_counters(client: httpx.Client, workers: Sequence[Metered], reading: ServerReading) -> ServerReading:
    """``reading`` with the workers' counters: of requests, images and drafts by role and worker, and of handoffs.

    Counters run from each worker's start. Each is None if a worker doesn't report it or if another process answers in
    its place; counters of images and drafts only need the workers that process images or speculate.
    """
    ended: dict[str, dict[str, int]] = {}
    pictures: dict[str, dict[str, ImageCounts]] = {}
    drafts: dict[str, dict[str, DraftCounts]] = {}
    handoffs: dict[str, dict[str, HandoffCounts]] | None = {}
    for worker in workers:
        try:
            body = client.get(f"{worker.url}/metrics").raise_for_status().content
        except httpx.HTTPError:
            return reading
        if not (counts := _ENDED.findall(body)):  # one sample per outcome
            return reading
        if worker.identity is not None and {_identity(labels) for labels, _ in counts} != {worker.identity}:
            return reading
        ended.setdefault(worker.role, {})[worker.name] = round(sum(float(count) for _, count in counts))
        if (found := image_counts(body)) is not None:
            pictures.setdefault(worker.role, {})[worker.name] = found
        if (drafted := draft_counts(body)) is not None:
            drafts.setdefault(worker.role, {})[worker.name] = drafted
        if worker.role == "decode" and handoffs is not None:
            counts_of_worker = handoff_counts(body)
            handoffs = None if counts_of_worker is None else {**handoffs, worker.name: counts_of_worker}
    if not workers:
        return reading
    return replace(reading, ended_requests=ended, pictures=pictures or None, handoffs=handoffs, drafts=drafts)


def _identity(labels: bytes) -> WorkerIdentity | None:
    """The identity in the labels of a sample (as Dynamo 1.6.1 has them); None if they are missing."""
    values = dict(LABEL.findall(labels.decode()))
    try:
        return WorkerIdentity(values["dynamo_namespace"], int(values["worker_id"], 16))
    except (KeyError, ValueError):
        return None


def _gpus_of(plan: Plan) -> Mapping[str, str]:
    """The UUID of each GPU assigned to a worker, by display name; empty for CPU workers."""
    return {
        f"GPU {index}": uuid
        for worker in plan.workers
        for index, uuid in zip(worker.gpu_indices, worker.env.get("CUDA_VISIBLE_DEVICES", "").split(","), strict=False)
    }


def _published(client: httpx.Client, target: Target) -> tuple[Metered, ...]:
    """The workers with readable metrics; empty unless all workers of the target publish a reachable metrics address."""
    try:
        answer = client.get(f"{target.url}{worker_facts.PATH}").raise_for_status()
        health = client.get(f"{target.url}{_HEALTH}").raise_for_status()
    except httpx.HTTPError:
        return ()
    found = [one for one in worker_facts.of_body(answer.content) or () if one.model == target.model]
    instances = _instances(health)
    on_loopback = is_loopback(urlsplit(target.url).hostname or "")
    metered = {}
    for one in found:
        namespace, instance = instances.get(one.worker_id, (None, None))
        if namespace is None or instance is None or one.facts.metrics_port is None:
            return ()
        if is_loopback(instance.host) and not on_loopback:
            return ()
        host = f"[{instance.host}]" if ":" in instance.host else instance.host
        metered[one.facts.name] = Metered(
            one.facts.name,
            one.facts.role,
            f"http://{host}:{one.facts.metrics_port}",
            WorkerIdentity(namespace, one.worker_id),
        )
    # Counters are reported by worker name, so equal names would be merged.
    return tuple(metered.values()) if len(metered) == len(found) == target.worker_count else ()


def _instances(health: httpx.Response) -> dict[int, tuple[str, Instance]]:
    """Namespace and address of each instance that a Dynamo frontend can route to, by worker id."""
    found = {}
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        for record in health.json()["instances"]:
            if (instance := read_instance(record)) is not None:
                found[instance.worker_id] = str(record["namespace"]), instance
    return found
