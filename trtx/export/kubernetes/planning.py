"""Plans the pods of a topology, with the checks of ``trtx serve`` except those of a machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from trtx.checkpoint import Checkpoint
from trtx.config import Finding, ResolvedEngineConfig, Role, TopologySpec
from trtx.config.left_out import LeftOutField, left_out_messages
from trtx.config.wording import quoted
from trtx.engine.tensorrt_llm.arguments import world_size
from trtx.engine.tensorrt_llm.environment import RECIPE_VARIABLES
from trtx.errors import UsageError
from trtx.export.kubernetes.rules import amount
from trtx.export.kubernetes.source import ModelSource, source_of
from trtx.export.kubernetes.target import KubernetesTarget, longest_name, name_of
from trtx.export.kubernetes.variables import HTTP_PORT, SYSTEM_PORT, arguments, module_of, variables
from trtx.export.nodes import check_launched_words, layout_of, nodes_of, refuse_encoders
from trtx.launch import remote_prompt_notes, resolve
from trtx.topology import BrokerPorts, Gpu, Machine, Plan, Ports, ProcessSpec, plan, refuse_between_hosts

RUN_DIRECTORY = PurePosixPath("/run/trtx")
CONFIG_DIRECTORY = RUN_DIRECTORY / "serve" / "configs"
"""The directory of the engine configs in a worker's container, below its run directory as on a single machine."""
ENGINES = ("tensorrt-llm", "torch", "paced")


@dataclass(frozen=True, slots=True)
class PodKind:
    """A set of identical pods: the frontends, or the workers of one role."""

    role: str
    replicas: int  # the number of frontends or workers
    command: tuple[str, ...]
    arguments: tuple[str, ...]
    variables: tuple[Mapping[str, Any], ...]  # EnvVar
    gpus: int  # GPUs of one pod
    pods: int  # pods of one worker; more than 1 if its engine spans nodes

    @property
    def is_worker(self) -> bool:
        return self.role != "frontend"


@dataclass(frozen=True, slots=True)
class PodPlan:
    """All inputs of the manifests."""

    target: KubernetesTarget
    model: str  # the name that clients send
    engine: str
    source: ModelSource
    checkpoint: Checkpoint  # on this machine
    kinds: tuple[PodKind, ...]  # frontends first
    engine_configs: Mapping[str, Mapping[str, Any]]  # role -> the LLM's keyword arguments
    findings: tuple[Finding, ...]
    reasons: tuple[str, ...]  # how engines are spread over nodes, and the network that KV uses
    routes_by_prefix: bool  # the topology uses the KV router
    left_out: tuple[LeftOutField, ...]  # fields of the engine configs that the engine does not act on
    chat_template: str | None = None  # the text that replaces the model's own

    @property
    def workers(self) -> tuple[PodKind, ...]:
        return tuple(kind for kind in self.kinds if kind.is_worker)

    @property
    def gpu_count(self) -> int:
        return sum(kind.replicas * kind.pods * kind.gpus for kind in self.kinds)


def plan_pods(spec: TopologySpec, target: KubernetesTarget) -> PodPlan:
    """Plans the pods. Raises UsageError for a topology that ``trtx serve`` would refuse, or that pods can't run."""
    refuse_encoders(spec, "pods")
    if spec.engine not in ENGINES:
        raise UsageError(
            f"--engine {spec.engine} can't be exported; expected one of {', '.join(ENGINES)}: auto is for a machine "
            "that can be looked at"
        )
    per_node = 0 if spec.engine == "paced" else target.gpus_per_node
    resolved = resolve(spec, None, has_gpu=per_node > 0)
    spec = resolved.chat.of(spec)
    source = source_of(resolved.model, resolved.checkpoint, target)
    nodes = {
        role: _nodes(role, config.values | _tp(spec), target, spec.engine, per_node)
        for role, config in resolved.configs.items()
    }
    values = {role: config.values | _tp(spec) for role, config in resolved.configs.items()}
    refuse_between_hosts(values, spec.engine, "each worker has a pod of its own")
    target = _named(target, spec.served_model_name or resolved.checkpoint.served_model_name, spec.mode, nodes)
    planned = _plan(spec, target, resolved.configs, resolved.checkpoint, source, on_gpu=per_node > 0)
    return PodPlan(
        target=target,
        model=planned.model,
        engine=planned.engine,
        source=source,
        checkpoint=resolved.checkpoint,
        kinds=tuple(_kinds(planned, target, nodes)),
        engine_configs=_engine_configs(planned, nodes, target),
        findings=resolved.findings,
        reasons=(
            *_reasons(spec, target, resolved.configs, nodes),
            *resolved.chat.reasons,
            *resolved.chat.warnings,
            *remote_prompt_notes(resolved.checkpoint.path, resolved.chat.template),
            *left_out_messages(planned.left_out, planned.engine),
        ),
        routes_by_prefix=planned.routes_by_prefix,
        left_out=planned.left_out,
        chat_template=resolved.chat.template,
    )


def _named(target: KubernetesTarget, model: str, mode: str, nodes: Mapping[Role, int]) -> KubernetesTarget:
    """Returns the target with a name, and refuses a name too long for the names derived from it.

    ``nodes``: the number of nodes of one worker, by role.
    """
    longest = longest_name(target.form, {"frontend": 1, **{str(role): count for role, count in nodes.items()}})
    if len(target.name) > longest:
        parts = " and ".join(f"{role} workers over {count} nodes" for role, count in nodes.items() if count > 1)
        raise UsageError(
            f"--name {quoted(target.name)} has {len(target.name)} characters, and Dynamo's operator takes {longest} "
            f"with {parts or 'these roles'}, because it joins both to names of at most 45 characters; give a shorter "
            "name"
        )
    return target if target.name else target.model_copy(update={"name": name_of(model, mode, longest)})


def _reasons(
    spec: TopologySpec,
    target: KubernetesTarget,
    configs: Mapping[Role, ResolvedEngineConfig],
    nodes: Mapping[Role, int],
) -> Iterator[str]:
    for role, count in nodes.items():
        if count > 1:
            yield from layout_of(role, configs[role].values | _tp(spec), target.gpus_per_node)
    if spec.mode == "disagg" and spec.engine == "tensorrt-llm" and target.has_no_rdma:
        yield (
            f"KV between pods goes by TCP over {target.ucx_devices}, as no --ucx-devices names those of InfiniBand or "
            "RoCE, such as mlx5_0:1 beside --resource rdma/ib=1"
        )


def _tp(spec: TopologySpec) -> dict[str, int]:
    return {"tensor_parallel_size": spec.tp} if spec.tp > 1 else {}


def _nodes(role: Role, values: Mapping[str, Any], target: KubernetesTarget, engine: str, per_node: int) -> int:
    """Returns the number of pods of one worker of ``role``. Raises UsageError."""
    nodes = nodes_of(role, values, engine, per_node)
    if nodes > 1 and target.form == "plain":
        raise UsageError(
            f"{role} asks for {nodes} nodes of {per_node} GPUs a worker: engines over several nodes need Dynamo's "
            "operator, which starts their pods together; leave --plain out, or use a smaller worker"
        )
    return nodes


def _plan(
    spec: TopologySpec,
    target: KubernetesTarget,
    configs: Mapping[Role, ResolvedEngineConfig],
    checkpoint: Checkpoint,
    source: ModelSource,
    *,
    on_gpu: bool,
) -> Plan:
    """Plans for a fictitious machine with enough GPUs, because the cluster decides where pods run."""
    sizes = {role: world_size(config.values | _tp(spec)) for role, config in configs.items()}
    wanted = sum(sizes[role] * count for role, count in spec.roles.items())
    gpus = tuple(Gpu(index, f"GPU-{index}", "GPU", 0) for index in range(wanted if on_gpu else 0))
    # A plan gives half the cores of a machine to engines. In a pod all cores belong to one engine, so double them.
    cores = 2 * _whole_cores(target.cpu) * sum(spec.roles.values())
    without = {role: replace(one, values=_without_nodes(one.values)) for role, one in configs.items()}
    return plan(
        spec.model_copy(update={"host": "0.0.0.0"}),
        Machine(gpus, cores),
        checkpoint=replace(checkpoint, path=Path(source.path)),
        engine=spec.engine,
        engine_configs=without,
        ports=Ports(
            http=(HTTP_PORT,) * target.frontends,
            brokers=(BrokerPorts(1, 2),) * target.frontends,
            system=(SYSTEM_PORT,) * sum(spec.roles.values()),
        ),
        namespace=f"{target.namespace}-{target.name}",
        run_dir=Path(RUN_DIRECTORY),
        scratch_dir=Path("/tmp"),
    )


def _whole_cores(quantity: str) -> int:
    """Returns the whole cores in a CPU quantity such as ``4`` or ``500m``, at least 1."""
    return max(1, int(amount(quantity) or 0))


def _without_nodes(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "gpus_per_node"}


def _kinds(planned: Plan, target: KubernetesTarget, nodes: Mapping[Role, int]) -> list[PodKind]:
    """Returns one kind for the frontends and one for each role, made from the first process of each.

    The other processes of a role differ only in values that each pod sets itself.
    """
    first: dict[str, ProcessSpec] = {}
    for process in planned.processes:
        first.setdefault(process.role, process)
    counts = planned.expected_workers()
    kinds = []
    for role, process in first.items():
        pods = nodes.get(role, 1)  # type: ignore[call-overload]  # a frontend has one
        gpus = len(process.gpu_indices) // pods
        entries = [*variables(process, target, gpus), *(_of_all_ranks(target, role) if pods > 1 else ())]
        kind = PodKind(
            role=role,
            replicas=counts.get(role, target.frontends),
            command=tuple(module_of(process.argv)),
            arguments=(*arguments(process, target.form), *_tls_flags(role, target)),
            variables=tuple(entries),
            gpus=gpus,
            pods=pods,
        )
        if kind.pods > 1:
            check_launched_words(kind.arguments)
        kinds.append(kind)
    return kinds


TLS_DIRECTORY = "/run/trtx-tls"


def _tls_flags(role: str, target: KubernetesTarget) -> tuple[str, ...]:
    if role != "frontend" or target.tls_secret is None:
        return ()
    return ("--tls-cert-path", f"{TLS_DIRECTORY}/tls.crt", "--tls-key-path", f"{TLS_DIRECTORY}/tls.key")


def _of_all_ranks(target: KubernetesTarget, role: str) -> list[dict[str, str]]:
    """Returns the variables that all ranks of an engine over several nodes need.

    :func:`trtx.engine.tensorrt_llm.environment.prepare` sets them only in the worker's process, which is rank 0. The
    operator's ``mpirun`` forwards only the variables in the container's ``env``.
    """
    shared = {**RECIPE_VARIABLES, "TRTLLM_EPLB_SHM_NAME": f"trtx_eplb_{target.name}_{role}"}
    return [{"name": name, "value": value} for name, value in shared.items()]


def _engine_configs(planned: Plan, nodes: Mapping[Role, int], target: KubernetesTarget) -> dict[str, Mapping[str, Any]]:
    several = {role for role, count in nodes.items() if count > 1}
    return {
        role: {**values, "gpus_per_node": target.gpus_per_node} if role in several else values
        for role, values in planned.engine_configs.items()
    }
