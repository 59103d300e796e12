"""``plan``: turns a spec and a machine into the processes to start on that machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtx.config import ResolvedEngineConfig, Role, TopologySpec
from trtx.engine import MODEL_ENGINES
from trtx.errors import UsageError
from trtx.topology import commands
from trtx.topology.core_placement import place_on_cores
from trtx.topology.machine import Gpu, Machine
from trtx.topology.placement import place, visible_gpus
from trtx.topology.plan import Plan, is_loopback
from trtx.topology.workers import Worker
from trtx.topology.workload import ModelFiles, Site, Workload


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports that the caller has allocated, all different: HTTP and broker per frontend, system port per worker."""

    http: tuple[int, ...]
    brokers: tuple[commands.BrokerPorts, ...]
    system: tuple[int, ...]

    @property
    def internal(self) -> tuple[int, ...]:
        """All ports on loopback, whatever address HTTP uses."""
        return (*(port for broker in self.brokers for port in (broker.xsub, broker.xpub)), *self.system)


def plan(
    spec: TopologySpec,
    machine: Machine,
    *,
    checkpoint: ModelFiles,
    engine: str,
    engine_configs: Mapping[Role, ResolvedEngineConfig],
    ports: Ports,
    namespace: str,
    run_dir: Path,
    scratch_dir: Path,
    engine_version: str | None = None,
) -> Plan:
    """Decides roles, GPUs and commands on one machine, from its arguments only.

    There is one frontend per port in ``ports.http``, and one worker per port in ``ports.system``. The other arguments
    are those of :meth:`Workload.of`. Raises UsageError if the machine has too few GPUs, or the engine can't run the
    spec.
    """
    work = Workload.of(
        spec,
        checkpoint=checkpoint,
        engine=engine,
        engine_configs=engine_configs,
        namespace=namespace,
        run_dir=run_dir,
        engine_version=engine_version,
        on_gpu=bool(machine.gpus),
    )
    placed_because: list[str] = []
    gpus, threads = _place_all(work, machine, placed_because)
    cpus: Sequence[tuple[int, ...]] = [() for _ in work.workers]
    if spec.worker_cores == "auto":
        placed = place_on_cores(machine, [worker.name for worker in work.workers], gpus)
        cpus = placed.cpus
        placed_because += placed.reasons
    env = {
        **commands.shared_environment(namespace, namespace, scratch_dir, spec),
        **commands.local_environment(scratch_dir, ports.brokers),
    }
    is_one_of_many = len(ports.http) > 1
    frontends = [
        work.frontend(
            f"frontend-{index}" if is_one_of_many else "frontend",
            env,
            Site(http_host=spec.host, http_port=port),
            broker=broker,
            frontends=len(ports.http),
        )
        for index, (port, broker) in enumerate(zip(ports.http, ports.brokers, strict=True))
    ]
    workers = [
        work.worker(
            worker,
            env,
            Site(system_port=system_port),
            gpus=[(gpu.index, gpu.uuid) for gpu in group],
            threads=threads,
            cpus=own,
        )
        for worker, group, own, system_port in zip(work.workers, gpus, cpus, ports.system, strict=True)
    ]
    reasons = [*placed_because, *work.reasons]
    if not is_loopback(spec.host):
        reasons.append(f"HTTP listens on {spec.host} because --host says so; everything else stays on loopback")
    return Plan(
        mode=spec.mode,
        engine=engine,
        model=work.model,
        model_path=checkpoint.path,
        namespace=namespace,
        host=spec.host,
        port=ports.http[0],
        internal_ports=ports.internal,
        run_dir=run_dir,
        scratch_dir=scratch_dir,
        processes=(*frontends, *workers),
        engine_configs=work.engine_configs,
        left_out=work.left_out,
        gpu_names=tuple(gpu.name for gpu in dict.fromkeys(gpu for group in gpus for gpu in group)),
        reasons=tuple(reasons),
        tls=work.tls,
    )


def threads_of(machine: Machine, workers: int) -> int:
    """CPU threads per worker for ``workers`` that compute on the CPU.

    Engines get half of the cores: frontend, worker processes and load generator need the rest. An OpenMP thread that
    loses its core to one of them delays all others at the next barrier (seen: 0.2 s became 7 s per request).
    """
    return max(1, machine.cpu_cores // 2 // workers)


def _place_all(work: Workload, machine: Machine, reasons: list[str]) -> tuple[list[tuple[Gpu, ...]], int | None]:
    """The GPUs of each worker, and without GPUs the CPU threads per worker. Adds to ``reasons``."""
    spec, engine, workers = work.spec, work.engine, work.workers
    threads = threads_of(machine, len(workers))
    if engine not in MODEL_ENGINES:
        if spec.gpus is not None:
            raise UsageError(f"--gpus {','.join(map(str, spec.gpus))}: engine {engine} uses no GPU; leave --gpus out")
        reasons.append(f"no GPU because engine {engine} computes nothing")
        return [() for _ in workers], 1
    gpus = visible_gpus(machine, spec.gpus)
    if not gpus:
        if spec.gpus is not None:
            raise UsageError("--gpus is empty; name at least one GPU, or leave it out")
        if work.wants_gpu:
            raise UsageError(f"engine {engine} needs a GPU, but none is visible; use --engine torch")
        if spec.tp > 1 and engine != "torch":
            raise UsageError(f"--tp {spec.tp} needs {spec.tp} GPUs per worker, but none is visible; leave --tp out")
        reasons.append(
            f"workers run on the CPU because no GPU is visible; each of {len(workers)} has {threads} CPU threads, "
            f"because half of {machine.cpu_cores} cores are for engines"
        )
        return [() for _ in workers], threads
    needed = sum(worker.gpu_count for worker in workers)
    if needed > len(gpus):
        raise UsageError(_too_few(spec, workers, needed, len(gpus)))
    own = [worker for worker in workers if not worker.shares_with]
    placed = dict(zip([worker.name for worker in own], place(gpus, [worker.gpu_count for worker in own]), strict=True))
    for worker in workers:
        if worker.shares_with:
            first = placed[worker.shares_with][0]
            placed[worker.name] = (first,)
            option = "--share-weights" if worker.weight_group else "--encode-shared"
            because = f" because of {option}, together with {worker.shares_with}"
        else:
            linked = any(gpu.nvlink_peers for gpu in placed[worker.name])
            because = " because GPUs with NVLink are preferred" if linked else ""
        names = ", ".join(f"GPU {gpu.index} ({gpu.name})" for gpu in placed[worker.name])
        reasons.append(f"{worker.name} on {names}{because}")
    return [placed[worker.name] for worker in workers], None


def _too_few(spec: TopologySpec, workers: Sequence[Worker], needed: int, there: int) -> str:
    own = [worker for worker in workers if not worker.shares_with]
    sizes = {worker.role: worker.gpu_count for worker in own}
    counts = {role: sum(worker.role == role for worker in own) for role in sizes}
    where = "named by --gpus" if spec.gpus is not None else "visible"
    if len(set(sizes.values())) > 1:
        asked = " + ".join(f"{count} {role} of {sizes[role]}" for role, count in counts.items())
        return f"{asked} GPUs each need {needed} GPUs, but {there} are {where}; lower tensor_parallel_size of one role"
    asked = " + ".join(f"{count} {role}" for role, count in counts.items())
    size = own[0].gpu_count
    fits = there // size if size else 0
    if spec.encode and fits < needed:
        way_out = (
            f"{fits} would fit; leave --encode out, so that the workers encode images themselves, or ask for fewer "
            "workers"
        )
        if needed - spec.encode * sizes["encode"] <= there:
            way_out = (
                f"leave --encode out, so that the workers encode images themselves, or share GPUs with --encode-shared "
                f"{spec.encoders} in its place"
            )
    elif spec.mode == "disagg" and fits < 2:
        way_out = "use --mode agg"
    elif fits == 0:
        way_out = f"lower --tp to {there}, or serve it on several nodes with trtx export slurm or kubernetes"
    elif spec.mode == "agg":
        way_out = f"{fits} would fit: --workers {fits}"
    else:
        way_out = f"{fits} would fit: --prefill {fits // 2} --decode {fits - fits // 2}"
    return f"{asked} of {size} GPU{'s' * (size > 1)} each need {needed} GPUs, but {there} are {where}; {way_out}"
