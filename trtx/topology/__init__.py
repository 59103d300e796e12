"""From what a person asks for to the exact processes that serve it: roles, GPUs, ports, commands, environment.

Owns the shape of a :class:`Plan`, the placement of workers on GPUs and every command line of a topology.
Does not look at the machine, write files or start anything: ``launch`` does, and hands in what it found.
Enter through :func:`plan`.
Always holds: the same arguments give the same plan, no GPU serves two workers, ports differ, a plan survives JSON.
"""

from trtx.topology.machine import Gpu, Machine
from trtx.topology.plan import TOPOLOGY_VARIABLE, Plan, ProcessSpec, is_loopback
from trtx.topology.planner import ModelFiles, Ports, check_router_args, check_size, plan

__all__ = [
    "TOPOLOGY_VARIABLE",
    "Gpu",
    "Machine",
    "ModelFiles",
    "Plan",
    "Ports",
    "ProcessSpec",
    "check_router_args",
    "check_size",
    "is_loopback",
    "plan",
]
