"""Formats the hosts of a plan: their addresses, their listening ports, and how the network traffic is protected."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from trtx.cli.sentences import fill
from trtx.topology import Plan, ProcessSpec, request_protection

_WIDTH = 80


def describe_hosts(plan: Plan) -> Iterator[str]:
    """Yields each host with its processes, each connection between hosts with its protection, and an empty line."""
    assert plan.etcd is not None and plan.nats is not None  # every plan over hosts has both
    yield f"Namespace  {plan.namespace}"
    yield f"etcd       {', '.join(plan.etcd.endpoints)}, a lost host leaves after {plan.etcd.host_lease_ttl_s} s"
    yield f"NATS       {plan.nats.url}"
    yield ""
    yield "Hosts:"
    for host in plan.hosts:
        if plan.this_host in ("", host.name):
            names = [process.name for process in plan.processes if process.host == host.name]
            yield f"  {host.name} {host.address}, device {host.device}: {', '.join(names)}"
    yield ""
    yield "What someone on the network can read:"
    for told in _paths(plan):
        yield from fill(f"  - {told}", _WIDTH)
    yield ""


def exposure(plan: Plan) -> str:
    """Returns the warning at the start of a share: which connections of ``plan`` are clear text."""
    assert plan.nats is not None
    clear = [] if request_protection(plan.processes[0].env).startswith("TLS") else ["requests", "answers"]
    clear += [] if plan.nats.url.startswith("tls:") else ["events"]
    return (
        f"{', '.join([*clear, 'metrics'])} and KV between the hosts are clear text; keep the hosts on a network of "
        "their own, or see docs/security.md for certificates"
    )


def describe_ports(process: ProcessSpec) -> str:
    """Formats everything a process listens on, such as ``10.77.0.1:8000 (HTTP), 10.77.0.1:17000 (requests)``."""
    named = [] if process.http_port is None else [f"{process.http_host}:{process.http_port} (HTTP)"]
    named += [f"{process.address}:{port} ({what})" for what, port in process.ports.items()]
    if ("--router-mode", "kv") in itertools.pairwise(process.argv):
        named.append(f"{process.address}, a port of the system's choice (for other routers)")
    if process.kv_ports is not None:
        named.append("some of {}:{}-{} (KV over TCP)".format(process.address, *process.kv_ports))
    return f"listens on {', '.join(named)}"


def _paths(plan: Plan) -> Iterator[str]:
    assert plan.etcd is not None and plan.nats is not None
    yield f"HTTP to the frontends: {'clear' if plan.tls is None else 'protected by TLS'}, no authentication"
    if plan.etcd.endpoints[0].startswith("https:"):
        yield "etcd: protected by mutual TLS"
    elif plan.etcd.credentials is not None:
        yield "etcd: clear, the password too; a client that has it can take the traffic of the workers"
    else:
        yield "etcd: clear, no authentication; every client that reaches it can take the traffic of the workers"
    is_open, is_tls = plan.nats.credentials is None, plan.nats.url.startswith("tls:")
    secret = "no authentication" if is_open else "password or token" if is_tls else "the password or token too"
    yield f"NATS, events with prompt token ids: {'TLS' if is_tls else 'clear'}, {secret}"
    yield f"requests and answers between frontends and workers: {request_protection(plan.processes[0].env)}"
    yield "system ports, metrics and the model's small files: clear, no authentication"
    if plan.mode == "disagg":
        yield "KV between prefill and decode workers: clear, no authentication"
