"""Turns a :class:`TopologySpec` into a :class:`Plan`, given the machine, the model, the configs and free ports."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trtx.checkpoint import (
    Checkpoint,
    default_model,
    describe_checkpoint,
    read_end_ids,
    read_model_config,
    resolve_checkpoint,
)
from trtx.checkpoint.drafts import check_draft_of
from trtx.checkpoint.facts import dtype_of, read_config
from trtx.checkpoint.quantized_tensors import check_quantized_tensors
from trtx.checkpoint.tensor_parallel import check_expert_sizes
from trtx.checkpoint.vision import read_vision_config
from trtx.config import (
    Finding,
    ModelFacts,
    ResolvedEngineConfig,
    Role,
    TopologySpec,
    check_engine_configs,
    config_family,
    load_engine_config,
    refuse_errors,
)
from trtx.config.left_out import OF_TP
from trtx.config.media import VIDEO_FIELDS
from trtx.config.planted_fault import refuse_planted_fault
from trtx.config.wording import quoted
from trtx.engine import KV_FAULT_VARIABLE, MODEL_ENGINES, installed_version, parse_kv_fault, resolve_kind
from trtx.engine.tensorrt_llm.multimodal import placeholder_of
from trtx.errors import UsageError
from trtx.launch.caller_variables import options_given, with_caller_variables
from trtx.launch.certificates import as_seen_outside, with_certificate
from trtx.launch.chat_format import ChatFormat, resolve_chat_format, with_chat_format
from trtx.launch.collector import collector_warnings
from trtx.launch.dynamo_package import require_dynamo
from trtx.launch.encode_configs import with_cpu_dtype, with_embedding_dtype, with_lone_images
from trtx.launch.machine import probe
from trtx.launch.memory import with_memory
from trtx.launch.ports import HOLDER
from trtx.launch.prompt_notes import with_prompt_note
from trtx.launch.router_args_check import check_flags
from trtx.launch.videos import video_warnings
from trtx.launch.warm_up import check_warm_up
from trtx.launch.weight_notes import with_weight_note
from trtx.topology import (
    BrokerPorts,
    Machine,
    Plan,
    Ports,
    check_router_args,
    check_size,
    conditional_flags,
    plan,
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The engine, checkpoint and configs of a topology, before its workers are placed."""

    model: str  # the name with which it was found
    engine: str
    engine_version: str | None  # TensorRT-LLM's version if it is the engine
    checkpoint: Checkpoint
    configs: dict[Role, ResolvedEngineConfig]
    findings: tuple[Finding, ...]
    chat: ChatFormat


def prepare(spec: TopologySpec, *, run_dir: Path, frontends: int = 1, fault: str | None = None) -> Plan:
    """Resolves everything and starts nothing. Writes nothing except a synthetic checkpoint into its cache.

    This process holds the plan's ports until :func:`trtx.launch.serve` starts it. Raises UsageError for anything that
    can't be served: an unknown model, field or engine, too few GPUs, a port in use.

    ``frontends`` listen on ``spec.port`` and the ports after it, or each on any free port. ``fault`` is the value of
    TRTX_FAULT, passed only by the one caller that serves wrong KV on purpose and reports it; all others are refused if
    the variable is set.
    """
    require_dynamo()
    _check_fault(fault)
    machine = probe()
    spec, certificate = with_certificate(spec)
    resolved = resolve(spec, machine, has_gpu=bool(machine.gpus))
    spec, chat = resolved.chat.of(spec), resolved.chat
    of_videos = video_warnings(resolved.engine, resolved.checkpoint.path, spec.media)
    of_traces = collector_warnings(spec.otlp_endpoint)
    namespace = f"trtx-{secrets.token_hex(4)}"
    ports = _hold_ports(spec, frontends)
    try:
        planned = plan(
            spec,
            machine,
            checkpoint=resolved.checkpoint,
            engine=resolved.engine,
            engine_configs=resolved.configs,
            ports=ports,
            namespace=namespace,
            run_dir=run_dir.absolute(),
            scratch_dir=Path(tempfile.gettempdir()) / namespace,
            engine_version=resolved.engine_version,
        )
        planned = with_memory(planned, machine)
    except UsageError:
        HOLDER.release((*ports.http, *ports.internal))
        raise
    planned = with_chat_format(planned, chat)
    planned = with_prompt_note(as_seen_outside(planned, certificate), resolved.checkpoint.path)
    planned = with_weight_note(planned, resolved.checkpoint.path)
    planned = _with_fault(with_caller_variables(planned, os.environ, options_given(spec)), fault)
    return replace(planned, findings=resolved.findings, warnings=(*planned.warnings, *of_videos, *of_traces))


def resolve(spec: TopologySpec, machine: Machine | None, *, has_gpu: bool) -> Resolved:
    """Resolves engine, checkpoint and configs. Raises UsageError. ``has_gpu``: the serving machine has one.

    ``machine`` None: the topology will run on other machines, so this machine's packages are irrelevant;
    ``spec.engine`` is not auto then.
    """
    check_size(spec)
    check_router_args(spec.router_args)
    check_flags(spec.router_args, spec.router_mode, conditional_flags(spec))
    engine = spec.engine if machine is None else _engine(spec, has_gpu=has_gpu)
    on_gpu = has_gpu and engine in MODEL_ENGINES
    model = spec.model or _default_model(engine) or default_model(on_gpu=on_gpu)
    # For other machines, the weights need not be here.
    checkpoint = describe_checkpoint(model) if machine is None else resolve_checkpoint(model)
    if engine == "torch":
        # Refuses in advance, with the same messages, what the engine would refuse once it runs.
        check_quantized_tensors(checkpoint.path, read_model_config(checkpoint.path))
        read_end_ids(checkpoint.path)
    check_media(spec, engine, checkpoint)
    chat = resolve_chat_format(spec, checkpoint.path, checkpoint.architecture)
    family = config_family(checkpoint.architecture, on_gpu=on_gpu, engine=engine)
    configs: dict[Role, ResolvedEngineConfig] = {
        role: load_engine_config(
            role,
            family=family,
            path=spec.engine_configs.get(role),
            overrides=_overrides_of(role, spec),
            engine=engine,
            model_dir=checkpoint.path,
        )
        for role in spec.roles
    }
    findings = check_configs(spec, configs, engine, checkpoint, machine)
    if engine == "torch":
        decoder = read_model_config(checkpoint.path)
        for values in (config.values for config in configs.values()):
            check_expert_sizes(decoder, values.get("moe_tensor_parallel_size"), values.get("moe_expert_parallel_size"))
            if machine is not None:
                check_draft_of(values.get("speculative_config") or {}, checkpoint.path)
        check_warm_up(configs, checkpoint)
        own = decoder.dtype
        configs = with_embedding_dtype(configs, own, is_gpu=on_gpu)
        if machine is not None and not on_gpu:
            configs = with_cpu_dtype(configs, own)
        if spec.deterministic:
            configs = with_lone_images(configs)
    elif engine == "tensorrt-llm" and spec.encoders:
        own = dtype_of(checkpoint.path, read_config(checkpoint.path))
        configs = with_embedding_dtype(configs, own, is_gpu=on_gpu)
    version = installed_version() if engine == "tensorrt-llm" and machine is not None else None
    return Resolved(model, engine, version, checkpoint, configs, findings, chat)


def _hold_ports(spec: TopologySpec, frontends: int) -> Ports:
    """Holds all ports. Raises UsageError, and holds none, if one is in use."""
    if spec.port + frontends > 1 << 16:
        raise UsageError(f"--port {spec.port} leaves no ports for --frontends {frontends}; give a lower one")
    http: list[int] = []
    try:
        for index in range(frontends):
            http.append(HOLDER.hold(spec.host, spec.port and spec.port + index))
    except UsageError:
        HOLDER.release(http)
        raise
    internal = HOLDER.hold_internal(2 * frontends + sum(spec.roles.values()))
    brokers = tuple(BrokerPorts(*internal[2 * index : 2 * index + 2]) for index in range(frontends))
    return Ports(tuple(http), brokers, internal[2 * frontends :])


# also the behaviour of runs before videos were supported (trtx/experiment/directory.py)
_TRUE_WITHOUT_MEDIA = (("max_videos", 0),)


def check_media(spec: TopologySpec, engine: str, checkpoint: Checkpoint) -> None:
    """Raises UsageError for media options without effect, and for a media path that is not a directory.

    An image or video option has no effect if the engine or the model takes none.
    """
    stated = spec.media.model_dump(exclude_defaults=True)
    names = [name for name, value in stated.items() if (name, value) not in _TRUE_WITHOUT_MEDIA]
    if names and engine not in MODEL_ENGINES:
        raise UsageError(
            f"{_option(names[0])} has no effect with --engine {engine}, whose workers take no images; leave it out, or "
            "use --engine torch"
        )
    options = [*map(_option, names), *([spec.encoders_typed] if spec.encoders else [])]
    # TensorRT-LLM supports more models
    placeholder = placeholder_of if engine == "tensorrt-llm" else read_vision_config
    if options and engine in MODEL_ENGINES and placeholder(checkpoint.path) is None:
        raise UsageError(
            f"{options[0]} has no effect with {checkpoint.served_model_name}, a text model; leave it out, or serve one "
            "that takes images"
        )
    of_videos = [name for name in names if name in VIDEO_FIELDS]
    if of_videos and engine == "tensorrt-llm":
        raise UsageError(
            f"{_option(of_videos[0])} has no effect with --engine {engine}, whose workers take images and no videos; "
            "leave it out, or use --engine torch"
        )
    vision = read_vision_config(checkpoint.path) if of_videos else None
    if vision is not None and vision.video_token_id is None:
        raise UsageError(
            f"{_option(of_videos[0])} has no effect with {checkpoint.served_model_name}, which takes images and no "
            "videos; leave it out, or serve a model that takes videos"
        )
    allowed = spec.media.allowed_media_path
    if allowed is not None and not allowed.is_dir():
        raise UsageError(f"--allowed-media-path {quoted(str(allowed))} is not a directory; name one, or leave it out")


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _overrides_of(role: Role, spec: TopologySpec) -> tuple[str, ...]:
    """The overrides for a role. Those for all roles do not apply to encoders.

    An encoder has no KV, no chunks and no batches of sequences.
    """
    if role != "encode":
        return spec.overrides
    return tuple(text for text in spec.overrides if text.startswith("encode."))


def _check_fault(fault: str | None) -> None:
    """Raises UsageError for an invalid fault, or if the environment sets a fault that no caller would report."""
    if fault is not None:
        parse_kv_fault(fault)
    else:
        refuse_planted_fault()


def _with_fault(planned: Plan, fault: str | None) -> Plan:
    if fault is None:
        return planned
    reason = f"EVERY WORKER RUNS WITH A FAULT, {KV_FAULT_VARIABLE}={fault}: answers are wrong on purpose"
    processes = tuple(
        replace(one, env={**one.env, KV_FAULT_VARIABLE: fault}) if one.role != "frontend" else one
        for one in planned.processes
    )
    return replace(planned, processes=processes, reasons=(reason, *planned.reasons))


def check_configs(
    spec: TopologySpec,
    configs: Mapping[Role, ResolvedEngineConfig],
    engine: str,
    checkpoint: Checkpoint,
    machine: Machine | None,
) -> tuple[Finding, ...]:
    """Findings about the configs as they will run, including ``--tp``. Raises UsageError for any error among them."""
    with_tp = {role: _with_tp(config, spec.tp) for role, config in configs.items()} if spec.tp > 1 else configs
    findings = check_engine_configs(
        with_tp,
        engine=engine,
        version=None if machine is None else _installed_version(engine),
        model=ModelFacts(checkpoint.architecture, checkpoint.context_by(engine)),
        gpus=() if machine is None else tuple(gpu.name for gpu in machine.gpus),
    )
    refuse_errors(findings)
    return findings


def _with_tp(config: ResolvedEngineConfig, tp: int) -> ResolvedEngineConfig:
    name = "tensor_parallel_size"
    return replace(config, values={**config.values, name: tp}, overridden={**config.overridden, name: OF_TP})


def _installed_version(engine: str) -> str | None:
    """The installed TensorRT-LLM version if it is the engine; None: use the version in the configs' headers."""
    version = installed_version() if engine == "tensorrt-llm" else None
    return None if version == "unknown" else version


def _default_model(engine: str) -> str:
    """The default model for simulation.

    Dynamo's mocker (seen with 1.6.1) makes up token ids, most of which have no text in tiny-trained's vocabulary.
    """
    return "synthetic:tiny" if engine == "simulated" else ""


def _engine(spec: TopologySpec, *, has_gpu: bool) -> str:
    if spec.engine == "simulated":
        return spec.engine
    engine = resolve_kind(spec.engine, has_gpu=has_gpu)
    if engine == "tensorrt-llm" and installed_version() is None:
        raise UsageError(
            "engine tensorrt-llm needs the package tensorrt_llm, which is not installed; "
            "install trtx[tensorrt-llm], or choose --engine torch"
        )
    return engine
