"""The registry of a plan's workers, the workers' processes on this machine, and the planes' credentials."""

from __future__ import annotations

import socket
from collections.abc import Callable

import psutil

from trtx.errors import LaunchError, UsageError
from trtx.launch.children import Child, RealChild
from trtx.launch.reachable import reachable
from trtx.planes.credentials import EtcdAuth, NatsAuth, secret_environment
from trtx.planes.etcd import Etcd
from trtx.planes.etcd_registry import EtcdRegistry
from trtx.planes.file_registry import FileRegistry
from trtx.planes.registry import Registry, RegistryUnknown
from trtx.planes.watched import WatchedRegistry
from trtx.topology import EtcdService, NatsService, Plan, ProcessSpec


def registry_of(plan: Plan, on_problem: Callable[[str], None] = lambda problem: None) -> Registry:
    """The registry for the plan's discovery backend. Sends no request yet.

    ``on_problem``: see :class:`~trtx.planes.watched.WatchedRegistry`. Raises UsageError if a credentials file can't be
    read.
    """
    if plan.etcd is None:
        return FileRegistry(plan.discovery_dir)
    etcd = open_etcd(plan.etcd)
    return WatchedRegistry(EtcdRegistry(etcd, plan.namespace, lease_ttl_s=plan.etcd.lease_ttl_s), on_problem)


def open_etcd(service: EtcdService) -> Etcd:
    """A client of a plan's etcd, with its credentials. Raises UsageError if their files can't be read."""
    auth = etcd_auth(service)
    return Etcd(service.endpoints, None if auth is None else auth.read(), timeout_s=2.0)


def etcd_auth(service: EtcdService) -> EtcdAuth | None:
    """The credentials for etcd. Raises UsageError for a combination of files that Dynamo does not accept."""
    one = service.credentials
    return None if one is None else EtcdAuth(one.ca, one.certificate, one.key, one.username, one.password_file)


def nats_auth(service: NatsService) -> NatsAuth | None:
    """The credentials for NATS. Raises UsageError for a combination of files that Dynamo does not accept."""
    one = service.credentials
    return None if one is None else NatsAuth(one.username, one.password_file, one.token_file)


def spawner_of(plan: Plan) -> Callable[[ProcessSpec], Child]:
    """Returns a function that starts processes of ``plan``; it raises OSError if a start fails.

    Each start reads the credentials files again, because they may be renewed, and passes on only the etcd endpoints
    that accept a connection at that time.

    Dynamo 1.6.1 gives all endpoints to etcd-client 0.17.0, which balances requests over them (tonic's
    ``balance_channel``). A request to an endpoint that refuses connections fails, and a worker sends several requests
    to register and repeats none of them: with one of two endpoints dead, 3 of 4 workers ended. Remove this once Dynamo
    repeats these requests.
    """

    def spawn(spec: ProcessSpec) -> Child:
        try:
            secrets = secret_environment(
                None if plan.etcd is None else etcd_auth(plan.etcd), None if plan.nats is None else nats_auth(plan.nats)
            )
        except UsageError as error:
            raise OSError(str(error)) from error
        return RealChild(spec, secrets | _endpoints(plan.etcd))

    return spawn


def _endpoints(etcd: EtcdService | None) -> dict[str, str]:
    """Environment variable with the reachable endpoints; empty if the plan's own value applies.

    The plan's value also applies if none is reachable; the process then waits for etcd.
    """
    found = () if etcd is None or len(etcd.endpoints) == 1 else reachable(etcd.endpoints)
    return {"ETCD_ENDPOINTS": ",".join(found)} if found else {}


def remove_left_behind(plan: Plan) -> int:
    """Removes stale registrations at this host's address: workers of an earlier share that was killed with its host.

    Their leases may not have expired yet. Call this while the share holds its ports and before it starts a process.
    Returns the number of removed workers. Raises LaunchError if etcd can't be read.
    """
    here = next((host.address for host in plan.hosts if host.name == plan.this_host), None)
    if plan.etcd is None or here is None:
        return 0
    held = {port for process in plan.processes for port in process.ports.values()}
    with open_etcd(plan.etcd) as etcd:
        registry = EtcdRegistry(etcd, plan.namespace, lease_ttl_s=plan.etcd.lease_ttl_s)
        try:
            there = [one for one in registry.instances() if one.host == here]
            dead = [one for one in there if one.port in held or not _listens(here, one.port)]
            for one in dead:
                registry.remove(one.worker_id)
        except RegistryUnknown as error:
            raise LaunchError(str(error)) from error
    return len(dead)


def _listens(address: str, port: int) -> bool:
    """Whether a process of this host listens on the port.

    On the same host, no firewall drops the connection attempt.
    """
    try:
        socket.create_connection((address, port), timeout=1.0).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True  # unknown, and a live worker must not be removed
    return True


def owner(registry: Registry, pid: int, claimed: set[int]) -> int | None:
    """The worker id of process ``pid``, found by the address on which it listens; for workers without a status file.

    The address must match too, because another host's worker may use the same port. Raises OSError if the registry
    can't be read.
    """
    unclaimed = [instance for instance in registry.instances() if instance.worker_id not in claimed]
    if not unclaimed:
        return None
    addresses = _listening_addresses(pid)
    return next((instance.worker_id for instance in unclaimed if (instance.host, instance.port) in addresses), None)


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which process ``pid`` itself listens; empty if they can't be read."""
    return {port for _, port in _listening_addresses(pid)}


def _listening_addresses(pid: int) -> set[tuple[str, int]]:
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except (psutil.Error, OSError):
        return set()
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    }
