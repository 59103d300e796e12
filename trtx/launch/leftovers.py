"""What a share that was cut off on this host has left, power lost or all killed: taken away before another starts.

Its name and its ports are the same again, so what stands in the way is known, and nobody else's.
"""

from __future__ import annotations

import shutil

from trtx.errors import UsageError
from trtx.launch.discovery import open_etcd
from trtx.launch.processes import members
from trtx.planes.etcd_registry import EtcdRegistry
from trtx.topology import Plan


def clear_leftovers(plan: Plan) -> None:
    """Of the share ``plan``, whose ports are held by the caller: its directory, and the records of workers at this
    host's address, which would be routed to until their leases end. Does nothing on one machine, where each start has a
    name of its own. Raises UsageError where a process of the share lives, OSError where etcd does not answer."""
    if not plan.this_host or plan.etcd is None:
        return
    if alive := members(plan.marker, ()):
        raise UsageError(
            f"a share of {plan.namespace} runs on {plan.this_host} already (pid {', '.join(map(str, sorted(alive)))}); "
            "end it first"
        )
    shutil.rmtree(plan.scratch_dir, ignore_errors=True)
    own = {process.address for process in plan.processes}
    with open_etcd(plan.etcd) as client:
        registry = EtcdRegistry(client, plan.namespace, lease_ttl_s=plan.etcd.lease_ttl_s)
        for instance in registry.instances():
            if instance.host in own:
                registry.remove(instance.worker_id)
