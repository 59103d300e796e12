"""The registry of a plan's workers, which of them is which process of this machine, and the secrets of both planes."""

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
    """Of the discovery that the plan's processes meet over. Asks nobody yet. ``on_problem``: see
    :class:`~trtx.planes.watched.WatchedRegistry`. Raises UsageError where the files of its credentials can't be
    read."""
    if plan.etcd is None:
        return FileRegistry(plan.discovery_dir)
    etcd = open_etcd(plan.etcd)
    return WatchedRegistry(EtcdRegistry(etcd, plan.namespace, lease_ttl_s=plan.etcd.lease_ttl_s), on_problem)


def open_etcd(service: EtcdService, *, timeout_s: float = 2.0) -> Etcd:
    """A client of a plan's etcd, with its credentials. Raises UsageError where their files can't be read."""
    auth = etcd_auth(service)
    return Etcd(service.endpoints, None if auth is None else auth.read(), timeout_s=timeout_s)


def etcd_auth(service: EtcdService) -> EtcdAuth | None:
    """Raises UsageError for another set of files than Dynamo takes."""
    one = service.credentials
    return None if one is None else EtcdAuth(one.ca, one.certificate, one.key, one.username, one.password_file)


def nats_auth(service: NatsService) -> NatsAuth | None:
    """Raises UsageError for another set of files than Dynamo takes."""
    one = service.credentials
    return None if one is None else NatsAuth(one.username, one.password_file, one.token_file)


def spawner_of(plan: Plan) -> Callable[[ProcessSpec], Child]:
    """Starts processes of ``plan`` with the secrets that it names files of, read anew for each: files are renewed; and
    with those endpoints of etcd alone that take a connection then. Raises OSError where one can't be started.

    Dynamo 1.4.2 gives etcd-client 0.17.0 all endpoints, which asks now one and now the other (tonic's
    ``balance_channel``). One that refuses connections fails what it is asked, and a worker registers by several
    questions, none of which is asked again: with one of two dead, 3 of 4 workers ended. Can go once they are."""

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
    """Of the environment, where it is not the plan's: none answers and the process waits, or all do."""
    found = () if etcd is None or len(etcd.endpoints) == 1 else reachable(etcd.endpoints)
    return {"ETCD_ENDPOINTS": ",".join(found)} if found else {}


def remove_left_behind(plan: Plan) -> int:
    """Takes out workers that are registered at the address of a share's host and can't be there: those of a share that
    was cut off with its host, whose leases have not ended. Asked while the share holds its ports and runs nothing yet.
    Returns how many they were. Raises LaunchError where etcd can't be asked."""
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
    """On this host, where nothing drops what is sent."""
    try:
        socket.create_connection((address, port), timeout=1.0).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True  # not known, and what lives must stay
    return True


def owner(registry: Registry, pid: int, claimed: set[int]) -> int | None:
    """The worker id of process ``pid``, by the address it listens on: for workers that write no status file. Another
    host's worker may listen on the same port. Raises OSError where what is registered can't be known."""
    unclaimed = [instance for instance in registry.instances() if instance.worker_id not in claimed]
    if not unclaimed:
        return None
    addresses = _listening_addresses(pid)
    return next((instance.worker_id for instance in unclaimed if (instance.host, instance.port) in addresses), None)


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which process ``pid`` itself listens; none where that can't be seen."""
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
