"""From a :class:`TopologySpec` to a :class:`Plan`: looks at the machine, the model, the configs and the ports."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trtx.checkpoint import Checkpoint, read_end_ids, read_model_config, resolve_checkpoint
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
from trtx.config.planted_fault import refuse_planted_fault
from trtx.config.wording import quoted
from trtx.engine import KV_FAULT_VARIABLE, installed_version, parse_kv_fault, resolve_kind
from trtx.errors import UsageError
from trtx.launch.certificates import Certificate, check_certificate
from trtx.launch.embedding_dtype import with_embedding_dtype
from trtx.launch.frontend_flags import check_flags
from trtx.launch.machine import probe
from trtx.launch.memory import with_memory
from trtx.launch.ports import HOLDER
from trtx.launch.warm_up import check_warm_up
from trtx.topology import Machine, Plan, Ports, check_router_args, check_size, plan


def prepare(spec: TopologySpec, *, run_dir: Path, fault: str | None = None) -> Plan:
    """Resolves everything and starts nothing. Writes nothing either, but a synthetic checkpoint into its cache.

    The ports of the plan stay held by this process until :func:`trtx.launch.serve` starts it. Raises UsageError for
    whatever can't be served: an unknown model, field or engine, too few GPUs, a port in use.

    ``fault``: what TRTX_FAULT holds, from the one caller that serves wrong KV on purpose and says so; all others are
    refused where it is set.
    """
    _check_fault(fault)
    check_size(spec)
    check_router_args(spec.router_args)
    check_flags(spec.router_args, spec.router_mode)
    machine = probe()
    engine = _engine(spec, machine)
    spec, certificate = _with_certificate(spec)
    on_gpu = bool(machine.gpus) and engine in ("torch", "tensorrt-llm")
    checkpoint = resolve_checkpoint(spec.model or _default_model(engine), on_gpu=on_gpu)
    if engine == "torch":
        # Refuses what the engine would refuse once it runs, in the same words.
        read_model_config(checkpoint.path)
        read_end_ids(checkpoint.path)
    _check_media(spec, engine, checkpoint)
    family = config_family(checkpoint.architecture, on_gpu=on_gpu)
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
    findings = _check(spec, configs, engine, checkpoint, machine)
    if engine == "torch":
        check_warm_up(configs, checkpoint)
        configs = with_embedding_dtype(configs, read_model_config(checkpoint.path).dtype, is_gpu=on_gpu)
    run_dir = run_dir.absolute()
    namespace = f"trtx-{secrets.token_hex(4)}"
    http = HOLDER.hold(spec.host, spec.port)
    xsub, xpub, *system = HOLDER.hold_internal(2 + sum(spec.roles.values()))
    ports = Ports(http=http, broker_xsub=xsub, broker_xpub=xpub, system=tuple(system))
    try:
        planned = plan(
            spec,
            machine,
            checkpoint=checkpoint,
            engine=engine,
            engine_configs=configs,
            ports=ports,
            namespace=namespace,
            run_dir=run_dir,
            scratch_dir=Path(tempfile.gettempdir()) / namespace,
            engine_version=installed_version() if engine == "tensorrt-llm" else None,
        )
        planned = with_memory(planned, machine)
    except UsageError:
        HOLDER.release((http, xsub, xpub, *system))
        raise
    return replace(_with_fault(_as_seen_outside(planned, certificate), fault), findings=findings)


def _with_certificate(spec: TopologySpec) -> tuple[TopologySpec, Certificate | None]:
    """``spec`` with absolute paths, which its frontends get, and what they will show their clients."""
    if spec.tls_cert is None or spec.tls_key is None:
        return spec, None
    cert, key = (path.expanduser().absolute() for path in (spec.tls_cert, spec.tls_key))
    return spec.model_copy(update={"tls_cert": cert, "tls_key": key}), check_certificate(cert, key)


def _as_seen_outside(planned: Plan, certificate: Certificate | None) -> Plan:
    """With what its clients see of it, and what whoever opens it to others should know."""
    reasons, warnings = planned.reasons, () if certificate is None else certificate.warnings
    if certificate is not None:
        names = ", ".join(certificate.names) or "no name"
        reasons += (
            f"HTTP speaks TLS because --tls-cert says so: for {names}, until {certificate.until:%Y-%m-%d}; the other "
            "ports stay plain",
        )
    if not planned.is_local:
        clear = "" if certificate is not None else "in clear text (--tls-cert and --tls-key) and "
        warnings += (
            f"HTTP listens on {planned.host}:{planned.port} {clear}without authentication: whoever reaches this "
            "machine can use it; docs/security.md has a gateway",
        )
    tls = None if planned.tls is None or certificate is None else replace(planned.tls, names=certificate.names)
    return replace(planned, tls=tls, reasons=reasons, warnings=warnings)


def _check_media(spec: TopologySpec, engine: str, checkpoint: Checkpoint) -> None:
    """Raises UsageError for what is said of images where none is taken, and for a directory that is none."""
    said = [f"--{name.replace('_', '-')}" for name in spec.media.model_dump(exclude_defaults=True)]
    if said and engine != "torch":
        raise UsageError(
            f"{said[0]} means nothing with --engine {engine}, whose workers take no images; leave it out, or use "
            "--engine torch"
        )
    said += [f"--encode {spec.encode}"] if spec.encode else []
    if said and engine == "torch" and read_vision_config(checkpoint.path) is None:
        raise UsageError(
            f"{said[0]} means nothing with {checkpoint.served_model_name}, a text model; leave it out, or serve one "
            "that takes images"
        )
    allowed = spec.media.allowed_media_path
    if allowed is not None and not allowed.is_dir():
        raise UsageError(f"--allowed-media-path {quoted(str(allowed))} is no directory; name one, or leave it out")


def _overrides_of(role: Role, spec: TopologySpec) -> tuple[str, ...]:
    """An encoder has no KV, no chunks and no batch of sequences: what is said to every role is not said to it."""
    if role != "encode":
        return spec.overrides
    return tuple(text for text in spec.overrides if text.startswith("encode."))


def _check_fault(fault: str | None) -> None:
    """Raises UsageError where the environment asks for a fault that nobody would tell of, or for none that there is."""
    if fault is not None:
        parse_kv_fault(fault)
    else:
        refuse_planted_fault()


def _with_fault(planned: Plan, fault: str | None) -> Plan:
    if fault is None:
        return planned
    told = f"EVERY WORKER RUNS WITH A FAULT, {KV_FAULT_VARIABLE}={fault}: answers are wrong on purpose"
    processes = tuple(
        replace(one, env={**one.env, KV_FAULT_VARIABLE: fault}) if one.role != "frontend" else one
        for one in planned.processes
    )
    return replace(planned, processes=processes, reasons=(told, *planned.reasons))


def _check(
    spec: TopologySpec,
    configs: Mapping[Role, ResolvedEngineConfig],
    engine: str,
    checkpoint: Checkpoint,
    machine: Machine,
) -> tuple[Finding, ...]:
    """What is worth telling of the configs as they will run, ``--tp`` included. Raises UsageError for any error."""
    tp = {"tensor_parallel_size": spec.tp} if spec.tp > 1 else {}
    findings = check_engine_configs(
        {role: replace(config, values=config.values | tp) for role, config in configs.items()},
        engine=engine,
        version=_installed_version(engine),
        model=ModelFacts(checkpoint.architecture, checkpoint.context_length),
        gpus=tuple(gpu.name for gpu in machine.gpus),
    )
    refuse_errors(findings)
    return findings


def _installed_version(engine: str) -> str | None:
    """Of TensorRT-LLM where it is what will serve; None leaves it to the headers of the configs."""
    version = installed_version() if engine == "tensorrt-llm" else None
    return None if version == "unknown" else version


def _default_model(engine: str) -> str:
    """Dynamo's mocker (seen: 1.4.2) makes up ids, most of them above tiny-trained's vocabulary: they have no text."""
    return "synthetic:tiny" if engine == "simulated" else ""


def _engine(spec: TopologySpec, machine: Machine) -> str:
    if spec.engine == "simulated":
        return spec.engine
    engine = resolve_kind(spec.engine, has_gpu=bool(machine.gpus))
    if engine == "tensorrt-llm" and installed_version() is None:
        raise UsageError(
            "engine tensorrt-llm needs the package tensorrt_llm, which is not installed; "
            "install trtx[tensorrt-llm], or choose --engine torch"
        )
    return engine
