"""The faults of a topology over two hosts, and what each costs: for the tests and the table of docs/hosts-faults.md.

    PYTHONPATH=tests/integration python tests/integration/hosts/host_faults.py [--rounds 3] [--only PART]

As root; prints the table.

The engine is the paced one (20 ms to the first token, 20 ms from token to token). The load is a request of two tokens
every 0.1 s and 6 clients with streams of 60 and 40 tokens, from the first host. A request is lost whose client got
anything but a whole answer within 60 s, and a stream cut that had begun. The outage is the time from the fault to the
first request that succeeds after the last one that was lost; whole again is when every worker and every frontend
answers requests again.
Of seconds: the median, and (the worst).
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
from topology_clients import PACED, stream_once

_STREAM_TOKENS = 60
_WHOLE_S = 120.0
_LOOK_S = 0.5
_AWAY_S = 20
_TIMES = 3
_BACK_S = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """A topology over both hosts."""

    arguments: tuple[str, ...]
    of_hosts: dict[str, Any]
    workers: tuple[str, ...]


AGG = Shape((*PACED, "--workers", "2"), {}, ("agg-0", "agg-1"))
DISAGG = Shape(
    (*PACED, "--mode", "disagg"),
    {name: {"roles": {"prefill": 1, "decode": 1}} for name in ("node1", "node2")},
    ("prefill-0", "prefill-1", "decode-0", "decode-1"),
)
FRONTENDS = Shape(PACED, {name: {"frontends": 1, "roles": {"agg": 1}} for name in ("node1", "node2")}, AGG.workers)
SHAPES = {"agg 1+1": AGG, "disagg 2+2": DISAGG, "agg 1+1, two frontends": FRONTENDS}


@dataclass(frozen=True, slots=True)
class Fault:
    """``act`` does it to a topology and ends it."""

    shape: str
    name: str
    act: Callable[[ServedHosts], None]
    asks: str = "frontend"  # the one whose clients are looked at
    has_no_other: bool = False  # the process that dies is the only one of its kind
    # What is routed to a worker between its death and the end of its records, milliseconds later, has nowhere to go: 2
    # were seen, once.
    loses_at_most: int = 2


def _kill(name: str, served: ServedHosts) -> None:
    served.kill(name)


def _cut(seconds: float, served: ServedHosts) -> None:
    served.hosts.second.cut()
    time.sleep(seconds)
    served.hosts.second.mend()


def _kill_share(served: ServedHosts) -> None:
    served.shares[served.hosts.second.name].process.kill()
    time.sleep(_AWAY_S)
    served.join_again()


def _lose_power(served: ServedHosts) -> None:
    served.hosts.second.lose_power()
    time.sleep(_AWAY_S)
    served.hosts.second.mend()
    served.join_again()


def _restart(server: str, seconds: float, served: ServedHosts) -> None:
    one = served.servers.etcd if server == "etcd" else served.servers.nats
    one.kill()
    time.sleep(seconds)
    one.start()


def _restart_again(served: ServedHosts) -> None:
    """Before a renewal of leases falls between."""
    for _ in range(_TIMES):
        _restart("etcd", 30, served)
        time.sleep(_BACK_S)


def _freeze(name: str, seconds: float, served: ServedHosts) -> None:
    pid = served.pid_of(name)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    if served.pid_of(name) == pid:
        os.kill(pid, signal.SIGCONT)


def _of(shape: str, workers: tuple[str, ...]) -> list[Fault]:
    faults = [Fault(shape, f"`kill -9` of {name}", functools.partial(_kill, name)) for name in workers]
    faults.append(Fault(shape, f"{workers[-1]} frozen for 5 s", functools.partial(_freeze, workers[-1], 5)))
    for seconds in (5, 30):
        faults.append(Fault(shape, f"link cut for {seconds} s", functools.partial(_cut, seconds)))
    for server in ("etcd", "nats"):
        for seconds in (3, 30):
            act = functools.partial(_restart, server, seconds)
            faults.append(Fault(shape, f"{'NATS' if server == 'nats' else server} away for {seconds} s", act))
    faults.append(Fault(shape, f"etcd away {_TIMES} times for 30 s, back for {_BACK_S} s each time", _restart_again))
    return faults


FAULTS = (
    Fault("agg 1+1", "`kill -9` of the only frontend", functools.partial(_kill, "frontend"), has_no_other=True),
    *_of("agg 1+1", AGG.workers),
    Fault("agg 1+1", f"`kill -9` of the other host's trtx serve, started again after {_AWAY_S} s", _kill_share),
    Fault(
        "agg 1+1",
        f"the other host without power for {_AWAY_S} s, then trtx serve join again",
        _lose_power,
        loses_at_most=20,
    ),
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
        served.plan.url_of(frontend), served.plan.model, whole.look, stream_tokens=_STREAM_TOKENS, whole_s=_WHOLE_S
    ) as measured:
        fault.act(served)
    return measured.cost


@dataclass
class _Whole:
    """Whether each worker has answered more requests than when it was last looked at, ``_LOOK_S`` before or longer, and
    each frontend answers one."""

    served: ServedHosts
    before: dict[str, float] = field(default_factory=dict)
    looked: float = 0.0

    def look(self) -> bool:
        if time.monotonic() < self.looked + _LOOK_S:
            return False
        now, before = self.served.requests(), self.before
        self.looked, self.before = time.monotonic(), now
        plan = self.served.plan
        names = [worker.name for worker in plan.workers]
        if not all(name in now and name in before and now[name] > before[name] for name in names):
            return False
        return all(stream_once(url, plan.model, "whole?", 1).is_good for url in plan.urls)


def _table(hosts: Hosts, servers: Servers, rounds: int, wanted: Callable[[str], bool]) -> list[str]:
    lines = [
        "| topology | fault | times | requests lost | streams cut | outage s | slowest request s | whole again s |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, shape in SHAPES.items():
        faults = [fault for fault in FAULTS if fault.shape == name and wanted(fault.name)]
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
    parser.add_argument("--only", action="append", default=[], help="what a fault's name holds")
    parser.add_argument("--without", action="append", default=[], help="what no fault's name holds")
    arguments = parser.parse_args()

    def wanted(name: str) -> bool:
        return not any(part in name for part in arguments.without) and (
            not arguments.only or any(part in name for part in arguments.only)
        )

    with two_hosts() as hosts, servers_on(hosts.first, hosts.directory) as servers:
        print("\n".join(_table(hosts, servers, arguments.rounds, wanted)))


if __name__ == "__main__":
    main()
