"""Starts, watches and stops the processes of a topology. No other room does.

Owns the processes of a topology, the ports held for them, their discovery records and scratch files, and the stop
signals. Does not decide what to start (``topology`` does) and does not measure (``bench`` does). Entry points:
:func:`prepare`, then :func:`serve`. ``supervisor.py`` finds dead, silent and unregistered processes, ``restarts.py``
decides when one starts again, and ``presence.py`` holds the lease with which a host's share leaves etcd. Always holds:
when ``serve`` is left, for whatever reason, no process of the topology is alive and its scratch files are removed. A
reported cause was always checked, and neither a failed write nor a failing event listener ends the supervision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trtx.launch.certificates import check_certificate, check_usual_client
    from trtx.launch.disk_space import write_problem
    from trtx.launch.events import Event
    from trtx.launch.guardian import Guardian
    from trtx.launch.handoffs import HandoffProofs
    from trtx.launch.host_preparation import (
        check_planes,
        host_here,
        host_named,
        join_share,
        prepare_hosts,
        settle_share,
    )
    from trtx.launch.interruption import Interruption, catch_signals
    from trtx.launch.machine import probe
    from trtx.launch.ports import LOWEST_EPHEMERAL, PortHolder
    from trtx.launch.preparation import prepare, resolve
    from trtx.launch.presence import SharePresence, publishing
    from trtx.launch.processes import members
    from trtx.launch.prompt_notes import remote_prompt_notes
    from trtx.launch.published import Published, find_published, name_of
    from trtx.launch.run_directory import new_run_directory
    from trtx.launch.served import ServedTopology, serve, take_place
    from trtx.launch.sleep_wake_update import ServedMemory
    from trtx.launch.slots import Restart, Slot

_HOMES = {
    "LOWEST_EPHEMERAL": "ports", "Event": "events", "Guardian": "guardian", "HandoffProofs": "handoffs",
    "Interruption": "interruption", "PortHolder": "ports", "SharePresence": "presence", "Published": "published",
    "Restart": "slots", "ServedMemory": "sleep_wake_update", "ServedTopology": "served", "Slot": "slots",
    "catch_signals": "interruption",
    "check_certificate": "certificates", "check_planes": "host_preparation", "check_usual_client": "certificates",
    "find_published": "published", "host_here": "host_preparation", "host_named": "host_preparation",
    "join_share": "host_preparation", "members": "processes", "name_of": "published",
    "new_run_directory": "run_directory", "prepare": "preparation", "prepare_hosts": "host_preparation",
    "probe": "machine", "publishing": "presence", "remote_prompt_notes": "prompt_notes",
    "resolve": "preparation", "serve": "served",
    "settle_share": "host_preparation", "take_place": "served",
    "write_problem": "disk_space",
}  # fmt: skip
__all__ = [
    "LOWEST_EPHEMERAL",
    "Event",
    "Guardian",
    "HandoffProofs",
    "Interruption",
    "PortHolder",
    "Published",
    "Restart",
    "ServedMemory",
    "ServedTopology",
    "SharePresence",
    "Slot",
    "catch_signals",
    "check_certificate",
    "check_planes",
    "check_usual_client",
    "find_published",
    "host_here",
    "host_named",
    "join_share",
    "members",
    "name_of",
    "new_run_directory",
    "prepare",
    "prepare_hosts",
    "probe",
    "publishing",
    "remote_prompt_notes",
    "resolve",
    "serve",
    "settle_share",
    "take_place",
    "write_problem",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Imports a name on first access: the guardian imports this package too, and must stay a few MB small."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
