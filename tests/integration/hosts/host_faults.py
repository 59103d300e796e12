"""The faults of a topology over two hosts, and what each costs: for the tests and the table of docs/hosts-faults.md.

    PYTHONPATH=tests/integration python tests/integration/hosts/host_faults.py [--rounds 3] [--only NAME …]

As root; prints the table.

The engine is the paced one (20 ms to the first token, 20 ms from token to token). The load is a request of two tokens
every 0.1 s and 6 clients with streams of 60 tokens, from the first host. A request is lost whose client got anything
but a whole answer within 60 s. The outage is the time from the fault to the first request that succeeds after the last
one that was lost; whole again is when every worker answers requests again.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from host_shares import ServedHosts, served_hosts
from host_topology import Servers, servers_on
from namespaces import Hosts, two_hosts
from outages import Cost, measuring, row
from topology_clients import PACED

_STREAM_TOKENS = 60
_WHOLE_S = 120.0
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Shape:
    """A topology over both hosts."""

    arguments: tuple[str, ...]
    of_hosts: dict[str, Any]
    workers: tuple[str, ...]


AGG = Shape((*PACED, "--workers", "2"), {}, ("agg-0", "agg-1"))
DISAGG = Shape(
    (*PACED, "--mode", "disagg", "--prefill", "2", "--decode", "2"),
    {name: {"roles": {"prefill": 1, "decode": 1}} for name in ("node1", "node2")},
    ("prefill-0", "prefill-1", "decode-0", "decode-1"),
)
FRONTENDS = Shape(
    AGG.arguments, {name: {"frontends": 1, "roles": {"agg": 1}} for name in ("node1", "node2")}, AGG.workers
)
SHAPES = {"agg 1+1": AGG, "disagg 2+2": DISAGG, "agg 1+1, two frontends": FRONTENDS}


@dataclass(frozen=True, slots=True)
class Fault:
    """``act`` does it to a topology and ends it. ``asks``: the frontend whose clients are looked at."""

    shape: str
    name: str
    act: Callable[[ServedHosts], None]
    asks: str = "frontend"


def _kill(name: str, served: ServedHosts) -> None:
    served.kill(name)


def _cut(seconds: float, served: ServedHosts) -> None:
    served.hosts.second.cut()
    time.sleep(seconds)
    served.hosts.second.mend()


def _restart(server: str, seconds: float, served: ServedHosts) -> None:
    one = served.servers.etcd if server == "etcd" else served.servers.nats
    one.kill()
    time.sleep(seconds)
    one.start()


def _freeze(name: str, seconds: float, served: ServedHosts) -> None:
    pid = served.pid_of(name)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    if served.pid_of(name) == pid:
        os.kill(pid, signal.SIGCONT)


def _of(shape: str, workers: tuple[str, ...]) -> list[Fault]:
    faults = [Fault(shape, f"`kill -9` of {name}", functools.partial(_kill, name)) for name in workers]
    for seconds in (5, 30):
        faults.append(Fault(shape, f"link cut for {seconds} s", functools.partial(_cut, seconds)))
    for server in ("etcd", "nats"):
        for seconds in (3, 30):
            act = functools.partial(_restart, server, seconds)
            faults.append(Fault(shape, f"{'NATS' if server == 'nats' else server} away for {seconds} s", act))
    return faults


FAULTS = (
    *_of("agg 1+1", ("frontend", *AGG.workers)),
    *_of("disagg 2+2", DISAGG.workers),
    Fault(
        "agg 1+1, two frontends",
        "`kill -9` of the other host's frontend",
        functools.partial(_kill, "frontend-1"),
        asks="frontend-0",
    ),
)


def measure(served: ServedHosts, fault: Fault) -> Cost:
    """One fault, until every worker answers again. AssertionError where that does not come about."""
    frontend = served.process(fault.asks)
    whole = _Whole(served)
    with measuring(
        frontend.url, served.plan.model, whole.look, stream_tokens=_STREAM_TOKENS, whole_s=_WHOLE_S
    ) as measured:
        fault.act(served)
    return measured.cost


@dataclass
class _Whole:
    """Whether each worker has answered more requests than when it was last looked at, ``_LOOK_S`` before or longer."""

    served: ServedHosts
    before: dict[str, float] = field(default_factory=dict)
    looked: float = 0.0

    def look(self) -> bool:
        if time.monotonic() < self.looked + _LOOK_S:
            return False
        now, before = self.served.requests(), self.before
        self.looked, self.before = time.monotonic(), now
        names = [worker.name for worker in self.served.plan.workers]
        return all(name in now and name in before and now[name] > before[name] for name in names)


def _table(hosts: Hosts, servers: Servers, rounds: int, only: list[str]) -> list[str]:
    lines = [
        "| topology | fault | times | requests | lost | cut in the middle | outage s (worst) | slowest s (worst) "
        "| whole again s (worst) |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, shape in SHAPES.items():
        faults = [fault for fault in FAULTS if fault.shape == name and (not only or fault.name in only)]
        if not faults:
            continue
        costs: dict[str, list[Cost]] = {fault.name: [] for fault in faults}
        directory = hosts.directory / f"shape-{list(SHAPES).index(name)}"
        with served_hosts(hosts, servers, directory, *shape.arguments, **shape.of_hosts) as served:
            for number in range(rounds):
                for fault in faults:
                    cost = measure(served, fault)
                    costs[fault.name].append(cost)
                    print(f"- {name}, {fault.name}, round {number + 1}: {cost}", file=sys.stderr, flush=True)
        lines += [f"| {name} {row(fault, of_it)}" for fault, of_it in costs.items()]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", default=[], help="a fault by its name")
    arguments = parser.parse_args()
    with two_hosts() as hosts, servers_on(hosts.first, hosts.directory) as servers:
        print("\n".join(_table(hosts, servers, arguments.rounds, arguments.only)))


if __name__ == "__main__":
    main()
