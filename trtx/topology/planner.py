"""``plan``: what was asked for and what is there, turned into the processes to start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trtx.config import ResolvedEngineConfig, Role, TopologySpec
from trtx.config.media import MediaLimits
from trtx.config.topology import MAX_WORKERS
from trtx.config.wording import quoted
from trtx.engine import needs_gpu
from trtx.engine.tensorrt_llm.arguments import backend_of, world_size
from trtx.engine.tensorrt_llm.versions import pipelines_prefill
from trtx.errors import UsageError
from trtx.topology import commands
from trtx.topology.machine import Gpu, Machine
from trtx.topology.placement import place, visible_gpus
from trtx.topology.plan import Plan, ProcessSpec, ServerTls, config_path, is_loopback

_ENGINES_WITHOUT_GPU = ("simulated", "paced")
_NO_ENCODER = {  # engine -> why it has no encode workers
    "simulated": "which computes nothing and sees no image; use --engine torch, or leave --encode out",
    "paced": "which computes nothing and sees no image; use --engine torch, or leave --encode out",
    "tensorrt-llm": "whose workers take no images from trtx yet; use --engine torch, or leave --encode out",
}


class ModelFiles(Protocol):
    """What planning needs of a checkpoint."""

    @property
    def path(self) -> Path: ...
    @property
    def served_model_name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports that the caller allocated, all different: HTTP, the event broker's two, one a worker."""

    http: int
    broker_xsub: int
    broker_xpub: int
    system: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Worker:
    role: Role
    name: str
    gpu_count: int


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
    """Decides roles, GPUs, ports and commands. Looks at nothing but its arguments.

    ``engine`` is resolved (never ``auto``), ``engine_version`` the installed TensorRT-LLM's; ``engine_configs`` has
    every role of ``spec.roles``; ``ports.system`` has a port a worker. Raises UsageError when the machine has too few
    GPUs or the engine can't run what is asked for.
    """
    check_router_args(spec.router_args)
    model = spec.served_model_name or checkpoint.served_model_name
    check_model_name(model)
    if spec.encode and engine in _NO_ENCODER:
        raise UsageError(f"--encode {spec.encode} means nothing with --engine {engine}, {_NO_ENCODER[engine]}")
    values, reasons = _with_tp(spec, engine_configs)
    sizes = {role: _gpus_per_worker(role, values[role], engine, engine_version) for role in spec.roles}
    workers = _workers(spec, sizes)
    wants_gpu = engine == "tensorrt-llm" and (engine_version is None or needs_gpu(engine_version))
    gpus, threads = _place_all(spec, machine, engine, workers, reasons, wants_gpu=wants_gpu)
    logs, status = run_dir / "serve" / "logs", run_dir / "serve" / "status"
    shared = commands.shared_environment(namespace, scratch_dir, ports.broker_xsub, ports.broker_xpub, spec.media)
    processes = [
        ProcessSpec(
            name="frontend",
            role="frontend",
            argv=commands.frontend_command(spec, namespace, ports.http, ports.broker_xsub, ports.broker_xpub),
            env=shared | commands.frontend_environment(spec.media),
            log_path=logs / "frontend.log",
        )
    ]
    for worker, group, system_port in zip(workers, gpus, ports.system, strict=True):
        status_file = None if engine == "simulated" else status / f"{worker.name}.json"
        processes.append(
            ProcessSpec(
                name=worker.name,
                role=worker.role,
                argv=_argv(
                    worker,
                    engine,
                    namespace,
                    checkpoint.path,
                    model,
                    values[worker.role],
                    run_dir,
                    status_file,
                    spec,
                ),
                env=shared | commands.worker_environment(tuple(gpu.uuid for gpu in group), system_port, threads),
                log_path=logs / f"{worker.name}.log",
                gpu_indices=tuple(gpu.index for gpu in group),
                status_file=status_file,
                system_port=system_port,
            )
        )
    for config in engine_configs.values():
        reasons += config.reasons
    if spec.router_mode == "kv":
        reasons.append(
            f"the KV router runs with {' '.join(commands.KV_ROUTER_FLAGS)} because with Dynamo's own one running "
            "request outweighs a cached prefix; --router-args overrides"
        )
    reasons += _body_reasons(spec.media)
    if not is_loopback(spec.host):
        reasons.append(f"HTTP listens on {spec.host} because --host says so; everything else stays on loopback")
    return Plan(
        mode=spec.mode,
        engine=engine,
        model=model,
        model_path=checkpoint.path,
        namespace=namespace,
        host=spec.host,
        port=ports.http,
        internal_ports=(ports.broker_xsub, ports.broker_xpub, *ports.system),
        run_dir=run_dir,
        scratch_dir=scratch_dir,
        processes=tuple(processes),
        engine_configs={str(role): role_values for role, role_values in values.items()},
        gpu_names=tuple(gpu.name for group in gpus for gpu in group),
        reasons=tuple(reasons),
        tls=None if spec.tls_cert is None or spec.tls_key is None else ServerTls(spec.tls_cert, spec.tls_key),
    )


def check_size(spec: TopologySpec) -> None:
    """Raises UsageError for more workers than a topology can have, before anything is looked up for them."""
    asked = sum(spec.roles.values())
    if asked > MAX_WORKERS:
        flags = {"agg": "--workers"}  # role -> its option, where that is not called after it
        typed = " and ".join(f"{flags.get(role, f'--{role}')} {count}" for role, count in spec.roles.items())
        raise UsageError(
            f"{typed}: a topology has at most {MAX_WORKERS} workers, all of them on this machine; ask for fewer"
        )


def check_router_args(words: Sequence[str]) -> None:
    """Raises UsageError for a flag of dynamo.frontend that trtx itself sets, or with which it could not serve.

    argparse takes the beginning of a flag for the flag, so that is refused too.
    """
    for word in words:
        flag = word.partition("=")[0]
        owned = [name for name in commands.OWNED_FRONTEND_FLAGS if flag == name or _begins(flag, name)]
        if owned:
            name = min(owned, key=len)
            meant = "" if flag == name else f" ({name})"
            raise UsageError(f"--router-args holds {flag}{meant}, {commands.OWNED_FRONTEND_FLAGS[name]}; leave it out")


def check_model_name(name: str) -> None:
    """Raises UsageError for a name that a log, a URL or a terminal would not show as it is."""
    if not name.isprintable():
        raise UsageError(
            f"the model would be served as {quoted(name)}; expected printable characters alone: give another "
            "--served-model-name"
        )


def _begins(flag: str, name: str) -> bool:
    return len(flag) > 2 and flag.startswith("--") and name.startswith(flag)


def _with_tp(
    spec: TopologySpec, configs: Mapping[Role, ResolvedEngineConfig]
) -> tuple[dict[Role, dict[str, Any]], list[str]]:
    """Engine configs with ``--tp`` in them: AutoDeploy's name for it is ``world_size``."""
    values = {role: {**config.values} for role, config in configs.items()}
    reasons: list[str] = []
    if spec.tp > 1:
        for role in (role for role in spec.roles if role != "encode"):
            name = "world_size" if backend_of(values[role]) == "_autodeploy" else "tensor_parallel_size"
            configured = int(values[role].get(name) or 1)
            if configured not in (1, spec.tp):
                reasons.append(f"{role}: {name} {spec.tp} because --tp says so, was {configured}")
            values[role][name] = spec.tp
    return values, reasons


def _body_reasons(media: MediaLimits) -> list[str]:
    body, inline = commands.body_mib(media), commands.largest_inline_bytes(media)
    if inline < media.max_media_bytes:
        return [
            f"a medium in a data: URL has at most {inline} bytes, not the {media.max_media_bytes} of "
            f"--max-media-bytes, because the frontend takes no body above {body} MiB; "
            "fetched ones (https:, file:) have them"
        ]
    if body > commands.LEAST_BODY_MIB:
        return [
            f"the frontend takes bodies of {body} MiB because --max-media-bytes {media.max_media_bytes} is that much "
            "in a data: URL"
        ]
    return []


def _gpus_per_worker(role: Role, values: Mapping[str, Any], engine: str, version: str | None) -> int:
    """The world size that the engine config asks for, if the engine can have one like it."""
    size = world_size(values)
    pipeline = int(values.get("pipeline_parallel_size") or 1)
    how = " x ".join(
        f"{short} {int(values.get(f'{long}_parallel_size') or 1)}"
        for short, long in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"))
    )
    if size > 1 and engine == "torch":
        raise UsageError(
            f"engine torch runs a worker on one GPU, but {role} asks for {size} ({how}); "
            "use --tp 1, or --engine tensorrt-llm"
        )
    per_node = values.get("gpus_per_node")
    if per_node is not None and size > int(per_node):
        raise UsageError(
            f"{role} asks for {size} GPUs a worker ({how}) and its gpus_per_node is {per_node}; trtx serves one "
            f"machine, so leave gpus_per_node out or set it to at least {size}"
        )
    if role == "prefill" and pipeline > 1 and version is not None and not pipelines_prefill(version):
        raise UsageError(
            f"prefill has pipeline_parallel_size {pipeline}, with which TensorRT-LLM {version} hangs (issue 11789, "
            "fixed in 1.3.0rc10); use tensor_parallel_size, or install a later release"
        )
    return size


def _workers(spec: TopologySpec, sizes: Mapping[Role, int]) -> list[_Worker]:
    """All workers, the roles in turn: neighbours in this list exchange embeddings and KV."""
    roles = spec.roles
    return [
        _Worker(role, f"{role}-{index}", sizes[role])
        for index in range(max(roles.values()))
        for role, count in roles.items()
        if index < count
    ]


def _place_all(
    spec: TopologySpec, machine: Machine, engine: str, workers: list[_Worker], reasons: list[str], *, wants_gpu: bool
) -> tuple[list[tuple[Gpu, ...]], int | None]:
    """GPUs of each worker, and CPU threads a worker where there is no GPU to work on."""
    # Half the cores for the engines: frontend, worker processes and load generator need the rest, and OpenMP threads
    # that lose their core to one of them hold up all others at the next barrier (seen: 0.2 s became 7 s a request).
    threads = max(1, machine.cpu_cores // 2 // len(workers))
    if engine in _ENGINES_WITHOUT_GPU:
        if spec.gpus is not None:
            raise UsageError(f"--gpus {','.join(map(str, spec.gpus))}: engine {engine} uses no GPU; leave --gpus out")
        reasons.append(f"no GPU because engine {engine} computes nothing")
        return [() for _ in workers], 1
    gpus = visible_gpus(machine, spec.gpus)
    if not gpus:
        if spec.gpus is not None:
            raise UsageError("--gpus is empty; name at least one GPU, or leave it out")
        if wants_gpu:
            raise UsageError(f"engine {engine} needs a GPU and none is visible; use --engine torch")
        if spec.tp > 1:
            raise UsageError(f"--tp {spec.tp} needs {spec.tp} GPUs a worker and none is visible; leave --tp out")
        reasons.append(
            f"workers run on the CPU because no GPU is visible; CPU threads a worker: {threads}, "
            f"because half of {machine.cpu_cores} cores are for engines, and workers are {len(workers)}"
        )
        return [() for _ in workers], threads
    needed = sum(worker.gpu_count for worker in workers)
    if needed > len(gpus):
        raise UsageError(_too_few(spec, workers, needed, len(gpus)))
    placed = place(gpus, [worker.gpu_count for worker in workers])
    for worker, group in zip(workers, placed, strict=True):
        linked = any(gpu.nvlink_peers for gpu in group)
        names = ", ".join(f"GPU {gpu.index} ({gpu.name})" for gpu in group)
        reasons.append(f"{worker.name} on {names}" + (" because NVLink neighbours come first" if linked else ""))
    return placed, None


def _too_few(spec: TopologySpec, workers: list[_Worker], needed: int, there: int) -> str:
    sizes = {worker.role: worker.gpu_count for worker in workers}
    where = "named by --gpus" if spec.gpus is not None else "visible"
    if len(set(sizes.values())) > 1:
        asked = " + ".join(f"{count} {role} of {sizes[role]}" for role, count in spec.roles.items())
        return f"{asked} GPUs each need {needed} GPUs, but {there} are {where}; lower tensor_parallel_size of one role"
    asked = " + ".join(f"{count} {role}" for role, count in spec.roles.items())
    size = workers[0].gpu_count
    fits = there // size if size else 0
    if spec.encode and fits < needed:
        way_out = f"{fits} would fit; leave --encode out, and who needs an image encodes it, or ask for fewer workers"
    elif spec.mode == "disagg" and fits < 2:
        way_out = "use --mode agg"
    elif fits == 0:
        way_out = f"lower --tp to {there}"
    elif spec.mode == "agg":
        way_out = f"{fits} would fit: --workers {fits}"
    else:
        way_out = f"{fits} would fit: --prefill {fits // 2} --decode {fits - fits // 2}"
    return f"{asked} of {size} GPU{'s' * (size > 1)} each need {needed} GPUs, but {there} are {where}; {way_out}"


def _argv(
    worker: _Worker,
    engine: str,
    namespace: str,
    model_path: Path,
    model: str,
    values: Mapping[str, Any],
    run_dir: Path,
    status_file: Path | None,
    spec: TopologySpec,
) -> tuple[str, ...]:
    if status_file is None:
        return commands.simulated_command(worker.role, namespace, model_path=model_path, model=model, values=values)
    return commands.worker_command(
        worker.role,
        worker.name,
        engine=engine,
        model_path=model_path,
        model=model,
        config=config_path(run_dir, worker.role),
        status_file=status_file,
        has_encoders=spec.encode > 0,
        media=spec.media,
    )
