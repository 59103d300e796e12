"""Plans the steps of a job: the plan of ``trtx serve --hosts`` for nodes that are not known yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtx.checkpoint import Checkpoint, default_model, resolve_checkpoint
from trtx.config import Finding, ResolvedEngineConfig, Role, TopologySpec
from trtx.config.hosts import HostSpec, HostsSpec
from trtx.config.left_out import LeftOutField, left_out_warnings
from trtx.config.wording import quoted
from trtx.engine.tensorrt_llm.arguments import world_size
from trtx.engine.tensorrt_llm.environment import RECIPE_VARIABLES
from trtx.errors import UsageError
from trtx.export.nodes import check_launched_words, layout_of, nodes_of, refuse_encoders
from trtx.export.slurm.placement import Place, place_on_nodes
from trtx.export.slurm.quoting import Shell
from trtx.export.slurm.spec import MOUNT_MARKS, JobSpec
from trtx.export.slurm.stand_ins import ADDRESSES, DEVICE, RUN_DIR, SCRATCH_DIR, arguments, variables
from trtx.launch import remote_prompt_notes, resolve
from trtx.topology import Plan, ProcessSpec, plan_hosts

ENGINES = ("tensorrt-llm", "torch", "paced")
_MOST_GPUS = 64  # the maximum for one engine, which is the limit of a host in a plan (HostSpec)
_SERVICE_PORTS = 3  # two ports of etcd and one of NATS, before the ports of the processes


@dataclass(frozen=True, slots=True)
class JobStep:
    """One process of the topology. ``nodes``: indices into the job's nodes; each runs ``tasks`` tasks, one per GPU."""

    name: str
    role: str
    nodes: tuple[int, ...]
    tasks: int
    gpus: tuple[int, ...]  # GPU indices on each node; empty: the process uses no GPU
    command: tuple[str, ...]  # the arguments; :class:`Shell` values are expanded by the script
    environment: Mapping[str, str]  # likewise

    @property
    def is_worker(self) -> bool:
        return self.role != "frontend"


@dataclass(frozen=True, slots=True)
class JobPlan:
    """All inputs of the batch file."""

    job: JobSpec
    spec: TopologySpec
    node_count: int
    model: str  # the name that clients send
    model_dir: Path  # the model's directory on the nodes
    checkpoint: Checkpoint  # on this machine
    engine: str
    steps: tuple[JobStep, ...]  # frontends first
    engine_configs: Mapping[str, Mapping[str, Any]]  # role -> the LLM's keyword arguments
    expected_workers: Mapping[str, int]
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...]
    left_out: tuple[LeftOutField, ...]  # fields of the engine configs that the engine does not act on
    chat_template: str | None = None  # the text that replaces the model's own

    @property
    def workers(self) -> tuple[JobStep, ...]:
        return tuple(step for step in self.steps if step.is_worker)

    @property
    def frontends(self) -> tuple[JobStep, ...]:
        return tuple(step for step in self.steps if not step.is_worker)

    @property
    def tasks_per_node(self) -> int:
        """The maximum number of tasks of a step on a node."""
        return max(step.tasks for step in self.steps)

    @property
    def gpu_count(self) -> int:
        """The GPUs of all workers."""
        return sum(len(step.gpus) * len(step.nodes) for step in self.steps)

    @property
    def spans_nodes(self) -> bool:
        """Whether an engine spans several nodes."""
        return any(step.is_worker and len(step.nodes) > 1 for step in self.steps)

    @property
    def gpus_per_node(self) -> int:
        return self.job.gpus_per_node if any(step.gpus for step in self.steps) else 0


def plan_job(spec: TopologySpec, job: JobSpec) -> JobPlan:
    """Plans the job. Raises UsageError for a topology that ``trtx serve`` would refuse, or that a job can't run."""
    refuse_encoders(spec, "steps of a job")
    if spec.engine not in ENGINES:
        raise UsageError(
            f"--engine {spec.engine} can't be exported, because the nodes choose no engine; expected one of "
            f"{', '.join(ENGINES)}"
        )
    if spec.port == 0:
        raise UsageError("--port 0 means any free port, but the file needs a fixed one; give a port")
    last = job.first_port + _SERVICE_PORTS - 1
    if job.first_port <= spec.port <= last:
        raise UsageError(
            f"--port {spec.port} is one of the ports {job.first_port} to {last} of etcd and NATS on the same node; "
            "choose another --port or --first-port"
        )
    if spec.engine == "tensorrt-llm" and not job.gpus_per_node:
        raise UsageError("--gpus-per-node 0: engine tensorrt-llm needs GPUs; give their number, or use --engine torch")
    per_node = 0 if spec.engine == "paced" else job.gpus_per_node
    if job.model_dir is None:
        _check_weights(spec.model, per_node)
    resolved = resolve(spec, None, has_gpu=per_node > 0)
    spec = resolved.chat.of(spec)
    values = {role: config.values | _tp(spec, role) for role, config in resolved.configs.items()}
    spans = {role: nodes_of(role, values[role], spec.engine, per_node) for role in spec.roles}
    if most := next((role for role, span in spans.items() if span * per_node > _MOST_GPUS and span > 1), None):
        raise UsageError(
            f"{most} asks for {spans[most] * per_node} GPUs a worker; expected at most {_MOST_GPUS} for one engine"
        )
    if job.container_image is not None and job.model_dir is None and _unmountable(resolved.checkpoint.path):
        raise UsageError(
            f"--model is in {quoted(str(resolved.checkpoint.path))}, and a path with a colon or a comma can't be "
            "mounted in a container; give another with --model-dir"
        )
    if job.mpi is not None and max(spans.values()) == 1:
        raise UsageError(f"--mpi {job.mpi} has no effect here, where no engine is larger than a node; leave it out")
    sizes = [(role, world_size(values[role]) if per_node else 0) for role in _in_turn(spec)]
    count, places = place_on_nodes([size for _, size in sizes], gpus_per_node=per_node, nodes=job.nodes)
    units = _units(zip((role for role, _ in sizes), places, strict=True))
    if job.frontends > len(units):
        raise UsageError(
            f"--frontends {job.frontends}: the job has room for {len(units)}, one on each node or on each group of "
            f"nodes that runs an engine; ask for {len(units)} at most, or for more nodes"
        )
    planned = plan_hosts(
        spec,
        _hosts(units, job, per_node),
        checkpoint=resolved.checkpoint,
        engine=resolved.engine,
        engine_configs={role: _of_one_host(config, spans[role]) for role, config in resolved.configs.items()},
        namespace=f"trtx-{job.name}",
        run_dir=RUN_DIR,
        scratch_dir=SCRATCH_DIR,
    )
    by_host = {f"node{index}": unit for index, unit in enumerate(units)}
    return JobPlan(
        job=job,
        spec=spec,
        node_count=count,
        model=planned.model,
        model_dir=job.model_dir or planned.model_path,
        checkpoint=resolved.checkpoint,
        engine=planned.engine,
        steps=tuple(_step(process, by_host[process.host].nodes, planned, job) for process in planned.processes),
        engine_configs={
            role: {**values, "gpus_per_node": per_node} if spans.get(role, 1) > 1 else values  # type: ignore[call-overload]
            for role, values in planned.engine_configs.items()
        },
        expected_workers=planned.expected_workers(),
        reasons=(
            *planned.reasons[1:],  # the first reason says that the hosts file places the workers, but trtx did
            *(one for role, span in spans.items() if span > 1 for one in layout_of(role, values[role], per_node)),
            *_kv_reasons(spec, job, resolved.engine, count),
            *resolved.chat.reasons,
            *resolved.chat.warnings,
            *remote_prompt_notes(resolved.checkpoint.path, resolved.chat.template),
            *left_out_warnings(planned.left_out, planned.engine),
        ),
        left_out=planned.left_out,
        findings=resolved.findings,
        chat_template=resolved.chat.template,
    )


def _unmountable(path: Path) -> bool:
    """Returns whether pyxis can't mount a path: its syntax FROM:TO[,…] has no escape for colons and commas."""
    return any(mark in str(path) for mark in MOUNT_MARKS)


def _kv_reasons(spec: TopologySpec, job: JobSpec, engine: str, nodes: int) -> Iterator[str]:
    if spec.mode == "disagg" and engine == "tensorrt-llm" and nodes > 1 and job.ucx_devices is None:
        yield (
            "KV between nodes goes by TCP over the network of their addresses, as no --ucx-devices names those of "
            "InfiniBand or RoCE, such as mlx5_0:1"
        )


@dataclass(frozen=True, slots=True)
class _Unit:
    """The nodes that form one host of the plan: a single node, or all nodes of one engine."""

    nodes: tuple[int, ...]
    roles: Mapping[Role, int]


def _check_weights(model: str | None, per_node: int) -> None:
    """Raises UsageError if the weights are not here; without --model-dir, nodes load them from the same path."""
    try:
        resolve_checkpoint(model or default_model(on_gpu=per_node > 0))
    except UsageError as error:
        raise UsageError(f"{error}; or say with --model-dir where the nodes have it") from error


def _in_turn(spec: TopologySpec) -> list[Role]:
    """Returns the role of each worker, in the order in which a plan numbers them."""
    return [role for index in range(max(spec.roles.values())) for role, count in spec.roles.items() if index < count]


def _units(placed: Any) -> list[_Unit]:
    counts: dict[tuple[int, ...], dict[Role, int]] = {}
    place: Place
    for role, place in placed:
        there = counts.setdefault(place.nodes, {})
        there[role] = there.get(role, 0) + 1
    return [_Unit(nodes, counts[nodes]) for nodes in sorted(counts)]


def _hosts(units: list[_Unit], job: JobSpec, per_node: int) -> HostsSpec:
    """Returns a hosts spec with placeholder addresses, which are replaced by variables in the batch file."""
    head = ADDRESSES[0]
    return HostsSpec(
        name=job.name,
        etcd=(f"http://{head}:{job.first_port}",),
        nats=f"nats://{head}:{job.first_port + 2}",
        lease_ttl_s=job.lease_ttl_s,
        hosts=tuple(
            HostSpec(
                name=f"node{index}",
                address=ADDRESSES[index],
                device=DEVICE,
                gpus=per_node * len(unit.nodes),
                frontends=int(index < job.frontends),
                roles=dict(unit.roles),
                first_port=job.first_port + _SERVICE_PORTS,
            )
            for index, unit in enumerate(units)
        ),
    )


def _tp(spec: TopologySpec, role: Role) -> dict[str, int]:
    return {"tensor_parallel_size": spec.tp} if spec.tp > 1 and role != "encode" else {}


def _of_one_host(config: ResolvedEngineConfig, nodes: int) -> ResolvedEngineConfig:
    """Returns the config without ``gpus_per_node`` if the engine spans nodes, which the plan treats as one host."""
    if nodes == 1:
        return config
    return replace(config, values={name: value for name, value in config.values.items() if name != "gpus_per_node"})


def _step(process: ProcessSpec, nodes: tuple[int, ...], planned: Plan, job: JobSpec) -> JobStep:
    is_worker = process.role != "frontend"
    nodes = nodes if is_worker else nodes[:1]
    several = len(nodes) > 1
    command, environment = arguments(process), variables(process, job)
    if several:
        command = [Shell("${LAUNCHER}"), *command]
        shared = {name: Shell(f"${{{name}:-{value}}}") for name, value in RECIPE_VARIABLES.items()}
        # A worker sets these variables only in its own process, which is rank 0; the other ranks need them too.
        # trtllm-llmapi-launch finds itself, python3 and MPI on PATH.
        environment |= {"PATH": Shell("${PYTHON_DIR}${PATH}")}
        environment |= {**shared, "TRTLLM_EPLB_SHM_NAME": Shell("trtx_eplb_${SLURM_JOB_ID}_" + process.name)}
        own = (str(job.model_dir or planned.model_path), *([job.python] if job.python else []))
        check_launched_words((*own, *(one for one in command if not isinstance(one, Shell))))
    elif is_worker and not process.gpu_indices:
        environment |= {"OMP_NUM_THREADS": Shell("${THREADS}"), "MKL_NUM_THREADS": Shell("${THREADS}")}
    per_node = len(process.gpu_indices) // len(nodes)
    return JobStep(
        name=process.name,
        role=process.role,
        nodes=nodes,
        tasks=per_node if several else 1,
        gpus=tuple(range(per_node)) if several else process.gpu_indices,
        command=tuple(command),
        environment=environment,
    )
