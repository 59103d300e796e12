"""``plan_hosts``: plans a topology over several machines, which have addresses and find each other in etcd."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from trtx.config import ResolvedEngineConfig, Role, TopologySpec
from trtx.config.hosts import LAST_SYSTEM_PORT, Certificates, HostSpec, HostsSpec, Password, Token
from trtx.config.wording import with_article
from trtx.engine import MODEL_ENGINES
from trtx.errors import UsageError
from trtx.topology import commands
from trtx.topology.host_placement import WorkerPlacement, place_on_hosts
from trtx.topology.plan import Credentials, EtcdService, NatsService, Plan, PlannedHost, ProcessSpec, group_of
from trtx.topology.ranked_handoff import refuse_between_hosts
from trtx.topology.workload import ModelFiles, Site, Workload

NOT_KNOWN = "–"
_KV_PORTS_A_RANK = 4
"""UCX uses a random port for each of its UCX workers in a process; the torch engine was seen to use one."""


def with_roles(spec: TopologySpec, hosts: HostsSpec) -> TopologySpec:
    """``spec`` with the worker counts that result from the hosts' roles; unchanged if they state none.

    Raises UsageError.
    """
    if not hosts.has_roles:
        return spec
    own: tuple[Role, ...] = ("agg",) if spec.mode == "agg" else ("prefill", "decode")
    counts: dict[Role, int] = dict.fromkeys(own, 0)
    for host in hosts.hosts:
        for role, count in (host.roles or {}).items():
            if role == "encode":
                raise UsageError(_no_encode(f"roles of {host.name} has encode workers"))
            if role not in counts:
                raise UsageError(
                    f"roles of {host.name} names {role}, but --mode {spec.mode} has only {' and '.join(own)} workers; "
                    f"choose --mode {'agg' if role == 'agg' else 'disagg'}, or leave it out"
                )
            counts[role] += count
    for role, count in counts.items():
        if not count:
            raise UsageError(
                f"no host has {with_article(f'{role} worker')} in its roles, but --mode {spec.mode} "
                "needs at least one; add it"
            )
    return spec.model_copy(update={"workers" if role == "agg" else role: count for role, count in counts.items()})


def plan_hosts(
    spec: TopologySpec,
    hosts: HostsSpec,
    *,
    checkpoint: ModelFiles,
    engine: str,
    engine_configs: Mapping[Role, ResolvedEngineConfig],
    namespace: str,
    run_dir: Path,
    scratch_dir: Path,
    engine_version: str | None = None,
    process_lease_s: int | None = None,
) -> Plan:
    """Decides hosts, GPUs, ports and commands from its arguments only.

    ``spec`` is a result of :func:`with_roles`; the other arguments are those of :meth:`Workload.of`. GPUs are
    identified by their index on each host, and CPU threads are not decided; :func:`settle` completes a share on its
    host. ``scratch_dir`` is the parent of each host's scratch directory. ``process_lease_s``: lease of each process in
    etcd, if launchers remove lost hosts; None: the same as a host's lease, because no launcher removes them. Raises
    UsageError if the workers do not fit on the hosts.
    """
    if spec.encoders:
        raise UsageError(_no_encode(spec.encoders_typed))
    work = Workload.of(
        spec,
        checkpoint=checkpoint,
        engine=engine,
        engine_configs=engine_configs,
        namespace=namespace,
        run_dir=run_dir,
        engine_version=engine_version,
        on_gpu=any(host.gpu_indices for host in hosts.hosts),
    )
    if engine not in MODEL_ENGINES:
        hosts = _without_gpus(hosts, engine)
    _check_gpus(work, hosts)
    if len(hosts.hosts) > 1:
        refuse_between_hosts(work.values, engine, f"the workers run on {len(hosts.hosts)} hosts")
    placed = place_on_hosts(hosts.hosts, work.workers)
    etcd = EtcdService(
        hosts.etcd,
        process_lease_s or hosts.lease_ttl_s,
        _credentials(hosts.etcd_auth),
        hosts.lease_ttl_s if process_lease_s else None,
    )
    nats = NatsService(hosts.nats, _credentials(hosts.nats_auth))
    frontends: list[ProcessSpec] = []
    workers: dict[str, ProcessSpec] = {}
    for host in hosts.hosts:
        there = [one for one in placed if one.host == host.name]
        if not there and not hosts.frontends_of(host):
            raise UsageError(f"no process would run on {host.name}; leave it out of the hosts, or ask for more workers")
        ports = _ports(host)
        shared = commands.shared_environment(
            namespace, group_of(namespace, host.name), scratch_dir / group_of(namespace, host.name), spec
        )
        for index in range(hosts.frontends_of(host)):
            site = _frontend_site(host, spec.port + index, ports)
            frontends.append(
                work.frontend(
                    f"frontend-{len(frontends)}" if _frontend_count(hosts) > 1 else "frontend",
                    shared | _planes(etcd, nats, site) | commands.response_environment(_known(site.response_port)),
                    site,
                    broker=None,
                    frontends=_frontend_count(hosts),
                )
            )
        for one in there:
            site = _worker_site(host, one, ports)
            workers[one.worker.name] = work.worker(
                one.worker,
                shared | _planes(etcd, nats, site),
                site,
                gpus=[(index, str(index)) for index in one.gpus],
                threads=None,
                device=host.device or commands.LOOPBACK_DEVICE,
            )
        end = next(ports)
        _check_http(host, spec.port, hosts.frontends_of(host), end)
        _check_services(host, (*etcd.endpoints, nats.url), end)
    processes = (*frontends, *(workers[worker.name] for worker in work.workers))
    return Plan(
        mode=spec.mode,
        engine=engine,
        model=work.model,
        model_path=checkpoint.path,
        namespace=namespace,
        host=frontends[0].http_host,
        port=spec.port,
        internal_ports=(),
        run_dir=run_dir,
        scratch_dir=scratch_dir,
        processes=processes,
        engine_configs=work.engine_configs,
        left_out=work.left_out,
        gpu_names=tuple(NOT_KNOWN for one in placed for _ in one.gpus),
        reasons=(*_reasons(hosts, placed), *work.reasons),
        discovery="etcd",
        hosts=tuple(
            PlannedHost(host.name, host.address, host.device or commands.LOOPBACK_DEVICE) for host in hosts.hosts
        ),
        etcd=etcd,
        nats=nats,
        tls=work.tls,
    )


def _planes(etcd: EtcdService, nats: NatsService, site: Site) -> dict[str, str]:
    return commands.remote_environment(etcd, nats, site.address, _known(site.request_port))


def _frontend_site(host: HostSpec, http_port: int, ports: Iterator[int]) -> Site:
    return Site(
        host=host.name,
        address=host.address,
        http_host=host.address,
        http_port=http_port,
        request_port=next(ports),
        response_port=next(ports),
    )


def _worker_site(host: HostSpec, one: WorkerPlacement, ports: Iterator[int]) -> Site:
    request, system = next(ports), next(ports)
    if system > LAST_SYSTEM_PORT:
        raise UsageError(
            f"{one.worker.name} on {host.name} would have system port {system}, but Dynamo 1.6.1 exits above "
            f"{LAST_SYSTEM_PORT}; lower first_port of {host.name}"
        )
    kv = [next(ports) for _ in range(_KV_PORTS_A_RANK * max(1, len(one.gpus)))]
    return Site(
        host=host.name,
        address=host.address,
        request_port=request,
        system_port=system,
        kv_ports=(kv[0], kv[-1]),
    )


def _ports(host: HostSpec) -> Iterator[int]:
    return iter(range(host.first_port, 1 << 16))


def _frontend_count(hosts: HostsSpec) -> int:
    return sum(hosts.frontends_of(host) for host in hosts.hosts)


def _known(port: int | None) -> int:
    assert port is not None  # sites created in this module have the port
    return port


def _check_http(host: HostSpec, first: int, count: int, end: int) -> None:
    if first == 0:
        raise UsageError(
            "--port 0 selects a different port at each start, but other hosts must know it; use a fixed port with "
            "--hosts"
        )
    if count and first + count > 1 << 16:
        raise UsageError(f"--port {first} leaves no ports for {count} frontends on {host.name}; use a lower one")
    if count and first < end and first + count > host.first_port:
        raise UsageError(
            f"--port {first} is one of the ports {host.first_port} to {end - 1} of {host.name}; choose another, or "
            "another first_port"
        )


def _check_services(host: HostSpec, addresses: tuple[str, ...], end: int) -> None:
    """Raises UsageError if etcd or NATS, which run before the topology starts, use a port of one of its processes."""
    for address in map(urlsplit, addresses):
        if address.hostname == host.address and address.port is not None and host.first_port <= address.port < end:
            raise UsageError(
                f"port {address.port} of {host.name} is used by {address.scheme}://{host.address}:{address.port}, but "
                f"is also one of the ports {host.first_port} to {end - 1} of its processes; give it another first_port"
            )


def _check_gpus(work: Workload, hosts: HostsSpec) -> None:
    """Raises UsageError if GPUs are missing on a host, or if only some workers would have GPUs."""
    if not hosts.has_roles:
        holders = hosts.hosts
    else:
        holders = tuple(host for host in hosts.hosts if any((host.roles or {}).values()))
    without = [host.name for host in holders if not host.gpu_indices]
    if work.engine not in MODEL_ENGINES:
        return
    if without and (work.wants_gpu or (work.spec.tp > 1 and work.engine != "torch")):
        why = f"engine {work.engine} needs a GPU" if work.wants_gpu else f"--tp {work.spec.tp} needs GPUs"
        raise UsageError(f"{why}, but {without[0]} has none in the hosts file; add gpus to it, or leave the host out")
    if without and len(without) < len(holders) and hosts.has_roles:
        raise UsageError(
            f"{without[0]} has no gpus but other hosts have some, and workers on CPU and GPU can't exchange KV; add "
            "gpus to it, or leave them out everywhere"
        )


def _without_gpus(hosts: HostsSpec, engine: str) -> HostsSpec:
    for host in hosts.hosts:
        if host.gpu_indices:
            raise UsageError(f"gpus of {host.name}: engine {engine} uses no GPU; leave gpus out")
    return hosts


def _credentials(auth: Certificates | Password | Token | None) -> Credentials | None:
    return None if auth is None else Credentials(**auth.model_dump())


def _no_encode(what: str) -> str:
    return (
        f"{what}, but encode workers pass embeddings in files, which works on one machine only; leave it out, so that "
        "the other workers encode images themselves"
    )


def _reasons(hosts: HostsSpec, placed: Sequence[WorkerPlacement]) -> Iterator[str]:
    if hosts.has_roles:
        yield "workers are placed by the hosts' roles"
    else:
        for host in hosts.hosts:
            names = [one.worker.name for one in placed if one.host == host.name]
            if names:
                yield f"{host.name} has {', '.join(names)} because pairs share a host, and the load is spread evenly"
    if not any(one.gpus for one in placed):
        yield "each host decides the CPU threads of its workers: half of its cores, divided among its workers"
