"""Turns a topology spec into the exact processes that serve it: roles, GPUs, ports, commands, environment.

Owns :class:`Plan`, the placement of workers on GPUs, and every command line of a topology (``commands.py``), with the
router's weights and how often Dynamo moves a request of a dead worker to another one. Does not look at the
machine, write files or start anything: ``launch`` does, and passes in what it found. Entry points: :func:`plan`; for
several machines, :func:`plan_hosts` and :func:`settle`. Always holds: equal arguments give equal plans, a GPU serves
one worker, or those that an option makes share it, ports differ, and a plan survives a round trip through JSON.
"""

from trtx.topology.commands import BrokerPorts, body_mib, conditional_flags
from trtx.topology.core_placement import cpu_ranges
from trtx.topology.host_planner import plan_hosts, with_roles
from trtx.topology.machine import Gpu, Machine, NumaNode
from trtx.topology.plan import (
    CHAT_TEMPLATE,
    TOPOLOGY_VARIABLE,
    Credentials,
    EtcdService,
    NatsService,
    Plan,
    PlannedHost,
    ProcessRole,
    ProcessSpec,
    ServerTls,
    is_loopback,
    template_path,
)
from trtx.topology.planner import Ports, plan
from trtx.topology.ranked_handoff import refuse_between_hosts
from trtx.topology.request_plane_tls import request_protection
from trtx.topology.settling import settle
from trtx.topology.weight_groups import weight_engines
from trtx.topology.workload import ModelFiles, check_router_args, check_size

__all__ = [
    "CHAT_TEMPLATE",
    "TOPOLOGY_VARIABLE",
    "BrokerPorts",
    "Credentials",
    "EtcdService",
    "Gpu",
    "Machine",
    "ModelFiles",
    "NatsService",
    "NumaNode",
    "Plan",
    "PlannedHost",
    "Ports",
    "ProcessRole",
    "ProcessSpec",
    "ServerTls",
    "body_mib",
    "check_router_args",
    "check_size",
    "conditional_flags",
    "cpu_ranges",
    "is_loopback",
    "plan",
    "plan_hosts",
    "refuse_between_hosts",
    "request_protection",
    "settle",
    "template_path",
    "weight_engines",
    "with_roles",
]
