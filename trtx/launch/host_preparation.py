"""Plans a topology over several hosts, and derives this machine's share from the plan."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from trtx.checkpoint import resolve_checkpoint
from trtx.config import ResolvedEngineConfig, Role, TopologySpec
from trtx.config.hosts import HostsSpec
from trtx.config.planted_fault import refuse_planted_fault
from trtx.config.wording import quoted
from trtx.engine import installed_version
from trtx.errors import UsageError
from trtx.launch.caller_variables import options_given, with_caller_variables
from trtx.launch.certificates import as_seen_outside, check_certificate, read_certificate, with_certificate
from trtx.launch.chat_format import resolve_chat_format, with_chat_format
from trtx.launch.discovery import etcd_auth, nats_auth
from trtx.launch.machine import probe
from trtx.launch.memory import with_memory
from trtx.launch.preparation import check_configs, check_media, resolve
from trtx.launch.presence import PROCESS_LEASE_S
from trtx.launch.prompt_notes import with_prompt_note
from trtx.launch.publishable import refuse_file_of_chat
from trtx.launch.published import OF_ONE_HOST, Published, PublishedInputs, find_published
from trtx.launch.router_args_check import check_flags
from trtx.launch.videos import video_warnings
from trtx.launch.weight_notes import with_weight_note
from trtx.planes.fitness import fit_or_refuse, judge_cluster, judge_nats, look_at_etcd
from trtx.planes.nats import ask_nats
from trtx.planes.secret_files import judge_secrets, look_at_secrets
from trtx.topology import (
    Credentials,
    EtcdService,
    Plan,
    PlannedHost,
    check_router_args,
    check_size,
    conditional_flags,
    plan_hosts,
    settle,
    with_roles,
)

_BLOCK_TOKENS = 32  # tokens per KV block if the engine config states none
_INFINIBAND = Path("/sys/class/infiniband")


def prepare_hosts(spec: TopologySpec, hosts: HostsSpec, *, run_dir: Path) -> tuple[Plan, PublishedInputs]:
    """The plan of all hosts, and the inputs that it was made from, for hosts that join.

    Each host runs its share (:func:`settle_share`). Starts no process, holds no port and accesses no other machine.
    Raises UsageError for anything that can't be served there.
    """
    refuse_planted_fault()
    spec, certificate = with_certificate(with_roles(spec, hosts))
    machine = probe()
    has_gpu = any(host.gpu_indices for host in hosts.hosts)
    refuse_file_of_chat(spec)
    resolved = resolve(spec, machine, has_gpu=has_gpu)
    spec = resolved.chat.of(spec)
    hosts = hosts.model_copy(update={"name": hosts.name or secrets.token_hex(4)})
    planned = plan_hosts(
        spec,
        hosts,
        checkpoint=resolved.checkpoint,
        engine=resolved.engine,
        engine_configs=resolved.configs,
        namespace=f"trtx-{hosts.name}",
        run_dir=run_dir.absolute(),
        scratch_dir=Path(tempfile.gettempdir()),
        engine_version=resolved.engine_version,
        process_lease_s=PROCESS_LEASE_S,
    )
    asked = PublishedInputs(
        resolved.model,
        planned.engine,
        {role: config.values for role, config in resolved.configs.items()},
        TopologySpec.model_validate(
            spec.model_dump(exclude=OF_ONE_HOST, exclude_defaults=True) | {"served_model_name": planned.model}
        ),
        hosts,
    )
    planned = with_chat_format(planned, resolved.chat)
    planned = with_prompt_note(as_seen_outside(planned, certificate), resolved.checkpoint.path)
    planned = with_weight_note(planned, resolved.checkpoint.path)
    planned = with_caller_variables(planned, os.environ, options_given(spec))
    return replace(planned, findings=resolved.findings), asked


def plan_again(asked: PublishedInputs, *, model_path: Path, this_host: str | None, run_dir: Path) -> Plan:
    """Repeats :func:`prepare_hosts` on a joining host from its published inputs, with this machine's own paths.

    ``asked`` is untrusted, because anybody may have written it, so it passes the same checks as typed input.
    ``this_host``: see :func:`host_here`. Raises UsageError.
    """
    refuse_planted_fault()
    spec, hosts = with_roles(asked.spec, asked.hosts), asked.hosts
    check_size(spec)
    check_router_args(spec.router_args)
    check_flags(spec.router_args, spec.router_mode, conditional_flags(spec))
    checkpoint = resolve_checkpoint(str(model_path))
    check_media(spec, asked.engine, checkpoint)
    resolve_chat_format(spec, checkpoint.path, checkpoint.architecture)
    configs: dict[Role, ResolvedEngineConfig] = {
        role: ResolvedEngineConfig(role, values, "the published plan", (f"{role}: engine config from etcd",))
        for role, values in asked.engine_configs.items()
    }
    findings = check_configs(spec, configs, asked.engine, checkpoint, probe())
    planned = plan_hosts(
        spec,
        hosts,
        checkpoint=checkpoint,
        engine=asked.engine,
        engine_configs=configs,
        namespace=f"trtx-{hosts.name}",
        run_dir=run_dir.absolute(),
        scratch_dir=Path(tempfile.gettempdir()),
        engine_version=installed_version() if asked.engine == "tensorrt-llm" else None,
        process_lease_s=PROCESS_LEASE_S,
    )
    planned = replace(planned, findings=findings)
    planned = with_caller_variables(planned, os.environ, options_given(spec))
    if planned.tls is None:
        return as_seen_outside(planned, None)
    if any(one.host == host_here(planned.hosts, this_host) for one in planned.frontends):
        return as_seen_outside(planned, with_certificate(spec)[1])
    return planned  # a host without a frontend needs no key


def settle_share(plan: Plan, host: str, *, model_path: Path, run_dir: Path) -> Plan:
    """Returns the share of ``plan`` that ``host``, which is this machine, runs.

    Raises UsageError if this machine lacks a GPU, a network device or the frontends' certificate, or if a model does
    not fit.
    """
    share = plan.share(host)
    if share.tls is not None and share.frontends:
        check_certificate(share.tls.certificate, share.tls.key)
    elif share.tls is not None:  # used to verify other hosts' frontends
        read_certificate(share.tls.certificate)
    _check_device(next(one for one in plan.hosts if one.name == host))
    machine = probe()
    settled = settle(
        share,
        machine,
        model_path=model_path,
        run_dir=run_dir.absolute(),
        scratch_parent=Path(tempfile.gettempdir()),
    )
    if not settled.workers:
        return settled
    warnings = (*settled.warnings, *video_warnings(settled.engine, model_path))
    return with_memory(replace(settled, warnings=warnings), machine)


def join_share(
    etcd: EtcdService,
    name: str,
    *,
    this_host: str | None,
    model: str | None,
    nats_files: Credentials | None,
    run_dir: Path,
) -> tuple[Plan, Plan, Published]:
    """Joins the topology ``name`` that is planned in ``etcd``.

    Returns this machine's settled share, the plan of all hosts, and the published inputs. ``this_host``, ``model``: see
    :func:`host_here` and :meth:`Published.check_here`. ``etcd.credentials`` and ``nats_files`` are this host's own,
    because a published plan contains no paths of secrets. Raises UsageError, EtcdError.
    """
    found = find_published(etcd, name, nats_files=nats_files)
    model_path = found.check_here(model)
    plan = plan_again(found.asked, model_path=model_path, this_host=this_host, run_dir=run_dir)
    host = host_here(plan.hosts, this_host)
    return settle_share(plan, host, model_path=model_path, run_dir=run_dir), plan, found


def check_planes(plan: Plan) -> tuple[str, ...]:
    """Checks etcd, NATS and the credentials files of ``plan`` before anything starts.

    Returns warnings, one sentence each. Raises LaunchError if etcd or NATS does not answer or is unfit, UsageError if a
    credentials file can't be read.
    """
    assert plan.etcd is not None and plan.nats is not None
    endpoints = [look_at_etcd(url, etcd_auth(plan.etcd)) for url in plan.etcd.endpoints]
    found = list(judge_secrets(look_at_secrets(etcd_auth(plan.etcd), nats_auth(plan.nats))))
    found += [one for _, amiss in judge_cluster(endpoints) for one in amiss]
    lengths = [values.get("max_seq_len") for values in plan.engine_configs.values()]
    blocks = [(values.get("kv_cache_config") or {}).get("tokens_per_block") for values in plan.engine_configs.values()]
    longest = max((int(one) for one in lengths if one), default=0) or resolve_checkpoint(
        str(plan.model_path)
    ).context_by(plan.engine)
    found += judge_nats(
        plan.nats.url,
        ask_nats(plan.nats.url, nats_auth(plan.nats)),
        context_length=longest,
        block_tokens=min((int(one or _BLOCK_TOKENS) for one in blocks), default=_BLOCK_TOKENS),
    )
    return tuple(str(one) for one in fit_or_refuse(found))


def host_here(hosts: Sequence[PlannedHost], named: str | None) -> str:
    """The name of the host in ``hosts`` that is this machine, found by its address. Raises UsageError.

    ``named`` (--this-host) selects one explicitly; this machine must have its address.
    """
    own = {one.address for found in psutil.net_if_addrs().values() for one in found if one.family == socket.AF_INET}
    here = [host for host in hosts if host.address in own]
    if named is None:
        if len(here) == 1:
            return here[0].name
        addresses = ", ".join(f"{host.address} ({host.name})" for host in (here or hosts))
        match = "several of the hosts' addresses" if here else "none of the hosts' addresses"
        raise UsageError(f"this machine has {match}: {addresses}; correct the hosts file, or use --this-host NAME")
    found = host_named(hosts, named)
    if found not in here:
        raise UsageError(
            f"--this-host {named} has address {found.address}, but this machine does not; correct one of them"
        )
    return named


def host_named(hosts: Sequence[PlannedHost], named: str) -> PlannedHost:
    """The host called ``named``. Raises UsageError if there is none."""
    found = next((host for host in hosts if host.name == named), None)
    if found is None:
        names = ", ".join(host.name for host in hosts)
        raise UsageError(f"--this-host {quoted(named)} is not one of the hosts; expected one of {names}")
    return found


def _check_device(host: PlannedHost) -> None:
    networks = {name for _, name in socket.if_nameindex()}
    for device in host.device.split(","):
        name = device.partition(":")[0]
        if name not in networks and not (_INFINIBAND / name).is_dir():
            raise UsageError(
                f"{host.name} has device {device}, but this machine does not (it has {', '.join(sorted(networks))}); "
                "correct device in the hosts file"
            )
        if name in networks and (problem := _device_problem(device)) is not None:
            raise UsageError(
                f"{host.name} has device {device}, {problem}, so it can't transfer KV; correct device in the hosts "
                "file, or set it up"
            )


def _device_problem(device: str) -> str | None:
    """Returns why UCX can't open connections on a network device of this machine; None if no problem can be seen."""
    name, _, port = device.partition(":")
    if port:
        return "and ports are of InfiniBand devices"
    if not psutil.net_if_stats()[name].isup:
        return "which is down"
    found = psutil.net_if_addrs().get(name, ())
    families = (socket.AF_INET, socket.AF_INET6)
    if not any(one.family in families and not one.address.startswith("fe80:") for one in found):
        return "which has at most a link-local address"
    return None
