"""The part of a topology that does not depend on its placement: its workers, their sizes, and their process specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from trtx.config import ResolvedEngineConfig, Role, TopologySpec
from trtx.config.left_out import OF_TP, LeftOutField, left_out_notes, without_left_out
from trtx.config.media import MediaLimits
from trtx.config.topology import MAX_WORKERS
from trtx.config.torch_together import conflict
from trtx.config.wording import quoted
from trtx.engine import needs_gpu
from trtx.engine.tensorrt_llm.arguments import backend_of, world_size
from trtx.engine.tensorrt_llm.versions import pipelines_prefill
from trtx.errors import UsageError
from trtx.topology import commands
from trtx.topology.local_prefill import check_conditional_disagg
from trtx.topology.plan import ProcessSpec, ServerTls, config_path, template_path
from trtx.topology.ranked_handoff import check_same_sums
from trtx.topology.weight_groups import check_sharing
from trtx.topology.workers import Worker, workers_of

_NO_ENCODER = {  # engine -> why it supports no encode workers
    "simulated": "which computes nothing and sees no image; use --engine torch, or leave it out",
    "paced": "which computes nothing and sees no image; use --engine torch, or leave it out",
}


_NOT_DETERMINISTIC = {  # engine -> why it can't be deterministic
    "simulated": "which computes nothing",
    "paced": "which computes nothing",
    "tensorrt-llm": "which has no such setting: its answers depend on what else is in a batch",
}


class ModelFiles(Protocol):
    """The properties of a checkpoint that planning uses."""

    @property
    def path(self) -> Path: ...
    @property
    def served_model_name(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a process runs, and its ports: the fields of :class:`ProcessSpec` with the same names."""

    host: str = ""
    address: str = "127.0.0.1"
    http_host: str = ""
    http_port: int | None = None
    request_port: int | None = None
    response_port: int | None = None
    system_port: int | None = None
    kv_ports: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A topology without a placement: everything that is the same wherever its processes run."""

    spec: TopologySpec
    engine: str  # resolved
    model: str  # the model name in requests
    model_path: Path
    values: dict[Role, dict[str, Any]]  # engine configs in effect, without ignored fields
    left_out: tuple[LeftOutField, ...]
    workers: tuple[Worker, ...]
    namespace: str
    run_dir: Path
    wants_gpu: bool  # its engine requires a GPU
    reasons: tuple[str, ...]

    @classmethod
    def of(
        cls,
        spec: TopologySpec,
        *,
        checkpoint: ModelFiles,
        engine: str,
        engine_configs: Mapping[Role, ResolvedEngineConfig],
        namespace: str,
        run_dir: Path,
        engine_version: str | None,
        on_gpu: bool,
    ) -> Workload:
        """Resolves a spec. Raises UsageError if the engine can't run it.

        ``engine`` is resolved (never ``auto``). ``engine_version`` is the installed TensorRT-LLM's. ``engine_configs``
        contains every role of ``spec.roles``. ``on_gpu``: some host of the topology has a GPU.
        """
        check_router_args(spec.router_args)
        model = spec.served_model_name or checkpoint.served_model_name
        check_model_name(model)
        if spec.encoders and engine in _NO_ENCODER:
            raise UsageError(f"{spec.encoders_typed} has no effect with --engine {engine}, {_NO_ENCODER[engine]}")
        if spec.deterministic and engine in _NOT_DETERMINISTIC:
            raise UsageError(
                f"--deterministic has no effect with --engine {engine}, {_NOT_DETERMINISTIC[engine]}; use --engine "
                "torch, or leave it out"
            )
        check_conditional_disagg(spec, engine, {role: config.values for role, config in engine_configs.items()})
        configs, reasons = _with_tp(spec, engine_configs)
        sizes = {role: _gpus_per_worker(role, configs[role].values, engine, engine_version) for role in spec.roles}
        check_sharing(spec, engine, {role: config.values for role, config in configs.items()})
        if spec.deterministic and engine == "torch":
            check_same_sums({role: config.values for role, config in configs.items()})
        split = {role: without_left_out(config, engine, on_gpu=on_gpu) for role, config in configs.items()}
        left_out = tuple(one for _, fields in split.values() for one in fields)
        for config in engine_configs.values():
            reasons += config.reasons
        reasons += left_out_notes(left_out, engine)
        if spec.router_mode == "kv":
            reasons.append(
                f"the KV router runs with {' '.join(commands.KV_ROUTER_FLAGS)} because with Dynamo's defaults one "
                "running request outweighs a cached prefix; --router-args overrides them"
            )
        if spec.conditional_disagg is not None and spec.mode == "disagg":
            reasons.append(f"the KV router may leave a prompt to a decode worker, by {spec.conditional_disagg}")
        if spec.deterministic:
            reasons.append(
                "workers sum in one order, independent of the batch, because of --deterministic: answers are bitwise "
                "reproducible and take longer (docs/determinism.md)"
            )
        reasons += _body_reasons(spec.media)
        workers = workers_of(spec, sizes)
        for group in dict.fromkeys(worker.weight_group for worker in workers if worker.weight_group):
            reasons.append(f"{' and '.join(group)} share one copy of the weights because of --share-weights")
        return cls(
            spec=spec,
            engine=engine,
            model=model,
            model_path=checkpoint.path,
            values={role: in_force for role, (in_force, _) in split.items()},
            left_out=left_out,
            workers=workers,
            namespace=namespace,
            run_dir=run_dir,
            wants_gpu=engine == "tensorrt-llm" and (engine_version is None or needs_gpu(engine_version)),
            reasons=tuple(reasons),
        )

    @property
    def engine_configs(self) -> dict[str, dict[str, Any]]:
        """The engine configs by role name, as in a plan."""
        return {str(role): values for role, values in self.values.items()}

    @property
    def tls(self) -> ServerTls | None:
        """The certificate of every frontend, or None."""
        spec = self.spec
        return None if spec.tls_cert is None or spec.tls_key is None else ServerTls(spec.tls_cert, spec.tls_key)

    @property
    def chat_template(self) -> Path | None:
        """The file from which its processes read the chat template that replaces the model's."""
        return None if self.spec.chat_template is None else template_path(self.run_dir)

    def frontend(
        self,
        name: str,
        env: Mapping[str, str],
        site: Site,
        *,
        broker: commands.BrokerPorts | None,
        frontends: int,
    ) -> ProcessSpec:
        """The process of a frontend. ``env``: the environment of all processes of its host, including discovery.

        ``frontends``: the number of frontends of the topology.
        """
        assert site.http_port is not None
        return ProcessSpec(
            name=name,
            role="frontend",
            argv=commands.frontend_command(
                self.spec,
                self.namespace,
                site.http_host,
                site.http_port,
                broker=broker,
                frontends=frontends,
                prompts_of=None if site.host else self.model_path,
                chat_template=self.chat_template,
                sleeps_in=self.run_dir if self._can_sleep and not site.host else None,
            ),
            env={**env, **commands.frontend_environment(self.spec.media), **self._tracing(name, env)},
            log_path=self.run_dir / "serve" / "logs" / f"{name}.log",
            **asdict(site),
        )

    def worker(
        self,
        worker: Worker,
        env: Mapping[str, str],
        site: Site,
        *,
        gpus: Sequence[tuple[int, str]],
        threads: int | None,
        device: str = commands.LOOPBACK_DEVICE,
        cpus: tuple[int, ...] = (),
    ) -> ProcessSpec:
        """The process of a worker. ``threads``, ``device``: see ``worker_environment``. ``cpus``: none for all.

        ``gpus``: index and UUID of each GPU, or the index as text if the UUID is unknown.
        """
        assert site.system_port is not None
        status_file = self.run_dir / "serve" / "status" / f"{worker.name}.json"
        is_simulated = self.engine == "simulated"
        argv = self._simulated_command(worker) if is_simulated else self._worker_command(worker, status_file, site)
        own = commands.worker_environment(
            tuple(name for _, name in gpus),
            site.system_port,
            threads,
            address=site.address,
            device=device,
            kv_ports=site.kv_ports,
        )
        return ProcessSpec(
            name=worker.name,
            role=worker.role,
            argv=argv,
            env={**env, **own, **self._tracing(worker.name, env)},
            log_path=self.run_dir / "serve" / "logs" / f"{worker.name}.log",
            gpu_indices=tuple(index for index, _ in gpus),
            cpus=cpus,
            status_file=None if is_simulated else status_file,
            **asdict(site),
        )

    @property
    def _can_sleep(self) -> bool:
        return self.engine == "torch" and any(one.get("sleep_config") is not None for one in self.values.values())

    def _tracing(self, name: str, env: Mapping[str, str]) -> dict[str, str]:
        return commands.tracing_environment(self.spec.otlp_endpoint, name, env.get("DYN_LOG", "warn"))

    def _simulated_command(self, worker: Worker) -> tuple[str, ...]:
        return commands.simulated_command(
            self.spec,
            worker.role,
            self.namespace,
            model_path=self.model_path,
            model=self.model,
            values=self.values[worker.role],
            chat_template=self.chat_template,
        )

    def _worker_command(self, worker: Worker, status_file: Path, site: Site) -> tuple[str, ...]:
        return commands.worker_command(
            self.spec,
            worker.role,
            worker.name,
            engine=self.engine,
            model_path=self.model_path,
            model=self.model,
            config=config_path(self.run_dir, worker.role),
            status_file=status_file,
            weight_group=worker.weight_group,
            prompts_by_frontend=not site.host,  # over hosts, a frontend's host may not have the model's files
            chat_template=self.chat_template,
        )


def check_size(spec: TopologySpec) -> None:
    """Raises UsageError for more workers than a topology can have, before anything is resolved for them."""
    asked = sum(spec.roles.values())
    if asked > MAX_WORKERS:
        flags = {"agg": "--workers"}  # role -> its option, if the name differs
        others = {flags.get(role, f"--{role}"): count for role, count in spec.roles.items() if role != "encode"}
        typed = " and ".join(
            filter(None, (spec.encoders_typed, *(f"{option} {count}" for option, count in others.items())))
        )
        raise UsageError(f"{typed}: a topology has at most {MAX_WORKERS} workers; ask for fewer")


def check_router_args(words: Sequence[str]) -> None:
    """Raises UsageError for a flag of dynamo.frontend that trtx sets itself, or with which it could not serve.

    Abbreviations are refused too, because argparse accepts them.
    """
    for word in words:
        flag = word.partition("=")[0]
        owned = [name for name in commands.OWNED_FRONTEND_FLAGS if flag == name or _begins(flag, name)]
        if owned:
            name = min(owned, key=len)
            meant = "" if flag == name else f" ({name})"
            raise UsageError(f"--router-args has {flag}{meant}, {commands.OWNED_FRONTEND_FLAGS[name]}; leave it out")


def check_model_name(name: str) -> None:
    """Raises UsageError for a name that a log, a URL or a terminal would not show unchanged."""
    if not name.isprintable():
        raise UsageError(
            f"the model would be served as {quoted(name)}; expected only printable characters; choose another "
            "--served-model-name"
        )


def _begins(flag: str, name: str) -> bool:
    return len(flag) > 2 and flag.startswith("--") and name.startswith(flag)


def _with_tp(
    spec: TopologySpec, configs: Mapping[Role, ResolvedEngineConfig]
) -> tuple[dict[Role, ResolvedEngineConfig], list[str]]:
    """Engine configs with ``--tp`` applied; AutoDeploy's field for it is ``world_size``. Also returns the reasons."""
    found = dict(configs)
    reasons: list[str] = []
    if spec.tp > 1:
        for role in (role for role in spec.roles if role != "encode"):
            values = found[role].values
            name = "world_size" if backend_of(values) == "_autodeploy" else "tensor_parallel_size"
            configured = int(values.get(name) or 1)
            if configured not in (1, spec.tp):
                reasons.append(f"{role}: {name} {spec.tp} because of --tp; the engine config has {configured}")
            found[role] = replace(
                found[role], values={**values, name: spec.tp}, overridden={**found[role].overridden, name: OF_TP}
            )
    return found, reasons


def _body_reasons(media: MediaLimits) -> list[str]:
    body, inline = commands.body_mib(media), commands.largest_inline_bytes(media)
    if inline < media.max_media_bytes:
        return [
            f"an image in a data: URL has at most {inline} bytes, because the frontend accepts no body above {body} "
            f"MiB; --max-media-bytes {media.max_media_bytes} applies to fetched images (https:, file:)"
        ]
    if body > commands.LEAST_BODY_MIB:
        return [
            f"the frontend accepts bodies of up to {body} MiB because a data: URL of --max-media-bytes "
            f"{media.max_media_bytes} is that large"
        ]
    return []


def _gpus_per_worker(role: Role, values: Mapping[str, Any], engine: str, version: str | None) -> int:
    """The world size of the engine config. Raises UsageError if the engine does not support it."""
    size = world_size(values)
    pipeline = int(values.get("pipeline_parallel_size") or 1)
    how = " x ".join(
        f"{short} {int(values.get(f'{long}_parallel_size') or 1)}"
        for short, long in (("tp", "tensor"), ("pp", "pipeline"), ("cp", "context"))
    )
    if engine == "torch":
        _check_torch(role, values, size, how)
    per_node = values.get("gpus_per_node")
    if per_node is not None and size > int(per_node):
        raise UsageError(
            f"{role} asks for {size} GPUs per worker ({how}), but its gpus_per_node is {per_node}; set gpus_per_node "
            f"to at least {size}, or run an engine over several nodes with trtx export slurm or kubernetes"
        )
    if role == "prefill" and pipeline > 1 and version is not None and not pipelines_prefill(version):
        raise UsageError(
            f"prefill has pipeline_parallel_size {pipeline}, with which TensorRT-LLM {version} hangs (issue 11789, "
            "fixed in 1.3.0rc10); use tensor_parallel_size, or install a later release"
        )
    return size


def _check_torch(role: Role, values: Mapping[str, Any], size: int, how: str) -> None:
    """Raises UsageError for GPUs that the torch engine can't use together."""
    if size != int(values.get("tensor_parallel_size") or 1):
        raise UsageError(
            f"{role} asks for {size} GPUs per worker ({how}), but engine torch only splits layers, not the model into "
            "stages or the sequences; use --tp alone, which is faster on one machine, or --engine tensorrt-llm"
        )
    if (problem := conflict(values)) is not None:
        raise UsageError(f"{role}: {problem}")
