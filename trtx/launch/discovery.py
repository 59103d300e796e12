"""The registry of a plan's workers, and which of them is which process of this machine."""

from __future__ import annotations

import psutil

from trtx.planes.file_registry import FileRegistry
from trtx.planes.registry import Registry
from trtx.topology import Plan


def registry_of(plan: Plan) -> Registry:
    """Of the discovery that the plan's processes meet over. Asks nobody yet."""
    return FileRegistry(plan.discovery_dir)


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
