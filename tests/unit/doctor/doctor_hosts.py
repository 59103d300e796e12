"""Hosts of a topology that are described rather than had: as they should be, and with each thing amiss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtx.doctor.host_facts import (
    HostReport,
    HostsFacts,
    Met,
    NetworkDevice,
    PortSpan,
    TakenPort,
    WantedHost,
)
from trtx.planes.fitness import EtcdEndpoint
from trtx.planes.nats import NatsAnswer
from trtx.planes.secret_files import SecretFile

ETCD = EtcdEndpoint(
    "http://10.77.0.1:2379",
    version="3.5.17",
    has_leader=True,
    answers_in_ms=1.2,
    wal_p99_ms=4.0,
    is_open=False,
    ahead_s=0.3,
)
NATS = NatsAnswer(version="2.10.22", max_payload_bytes=1 << 20, auth_required=True)
_VERSIONS = {"python": "3.12.3", "trtx": "0.1.0", "ai-dynamo": "1.6.1", "torch": "2.11.0+cu130"}
_ETH1 = NetworkDevice("eth1", exists=True, is_up=True, addresses=("10.77.0.2",))


def wanted(number: int, **changes: Any) -> WantedHost:
    host = WantedHost(f"node{number}", f"10.77.0.{number}", ("eth1",), 4, PortSpan((8000,), tuple(range(17000, 17006))))
    return replace(host, **changes)


def report(number: int, **changes: Any) -> HostReport:
    address = f"10.77.0.{number}"
    one = HostReport(f"node{number}", 1e9, _VERSIONS, 4, (replace(_ETH1, addresses=(address,)),), ())
    return replace(one, **changes)


def met(there: HostReport | None = report(2), ahead_s: float | None = 0.004, **ports: Any) -> Met:
    """``ports``: states by ``p`` and number."""
    states = dict.fromkeys(wanted(2).ports.all, "answered" if there is not None else "refused")
    states |= {int(name[1:]): state for name, state in ports.items()}
    return Met(states, there, None if there is None else ahead_s, 0.0002)  # type: ignore[arg-type]


def hosts(**changes: Any) -> HostsFacts:
    """Two, seen from the first, with nothing amiss."""
    facts = HostsFacts(
        this_host="node1",
        hosts=(wanted(1), wanted(2)),
        own=report(1),
        met={"node2": met()},
        waited_s=1.2,
        etcd=(ETCD,),
        nats_url="nats://10.77.0.1:4222",
        nats=NATS,
        secret_files=(SecretFile("/etc/trtx/key.pem", 0o600),),
        etcd_way="tls",
        nats_way="password",
        requests="clear, no authentication",
    )
    return replace(facts, **changes)


def meeting(**changes: Any) -> HostsFacts:
    """The second host's doctor tells of something else."""
    return hosts(met={"node2": met(report(2, **changes))})


_OWN = TakenPort(17000, "python, pid 7", is_own=True)
_FOREIGN = TakenPort(17001, "nginx, pid 9", is_own=False)
_TAKEN = {"p17000": "other", "p17001": "other"}

HOSTS = {
    "two hosts": hosts(),
    "etcd away": hosts(etcd=(EtcdEndpoint(ETCD.url, problem="etcd does not answer (10.77.0.1:2379: refused)"),)),
    "one of two etcd away": hosts(etcd=(ETCD, EtcdEndpoint(ETCD.url, problem="etcd does not answer (refused)"))),
    "etcd amiss": hosts(
        etcd=(
            replace(
                ETCD,
                version="3.3.2",
                has_leader=False,
                alarms=("memberID:1 alarm:NOSPACE",),
                answers_in_ms=900.0,
                wal_p99_ms=64.0,
                is_open=True,
                listens_on_all=True,
                ahead_s=-30.0,
            ),
        ),
        etcd_way="open",
    ),
    "etcd open": hosts(etcd=(replace(ETCD, is_open=True),), etcd_way="open"),
    "three etcd": hosts(etcd=(ETCD, ETCD, replace(ETCD, is_open=None, wal_p99_ms=None, ahead_s=None))),
    "NATS away": hosts(nats=NatsAnswer(problem="Connection refused")),
    "NATS over TLS": hosts(nats=replace(NATS, tls_required=True)),
    "NATS that lets nobody in": hosts(nats=replace(NATS, refusal="Authorization Violation")),
    "NATS open": hosts(nats=replace(NATS, auth_required=False), nats_way="open", secret_files=()),
    "credentials that are not there": hosts(secret_files=(SecretFile("/etc/trtx/key.pem", problem="No such file"),)),
    "credentials here and there": hosts(
        secret_files=(
            SecretFile("/etc/trtx/key.pem", 0o640),
            SecretFile("/etc/trtx/password", problem="Permission denied"),
            SecretFile("/etc/trtx/token", 0o600),
        )
    ),
    "credentials for all": hosts(secret_files=(SecretFile("/etc/trtx/key.pem", 0o644),)),
    "served already": hosts(own=report(1, taken=(_OWN,)), met={"node2": met(report(2, taken=(_OWN,)), p17000="other")}),
    "ports in use": hosts(
        own=report(1, taken=(_FOREIGN,)), met={"node2": met(report(2, taken=(_OWN, _FOREIGN)), **_TAKEN)}
    ),
    "a firewall": hosts(met={"node2": met(p17000="silent", p17002="refused")}),
    "nobody there": hosts(met={"node2": Met(dict.fromkeys(wanted(2).ports.all, "silent"))}),
    "no doctor there": hosts(met={"node2": met(None)}),
    "a clock behind": hosts(met={"node2": met(ahead_s=-4.0)}),
    "other trtx": meeting(versions={**_VERSIONS, "trtx": "0.2.0"}),
    "other torch": meeting(versions={**_VERSIONS, "torch": "2.12.0+cu130"}),
    "no such device": meeting(devices=(NetworkDevice("eth1", exists=False),)),
    "device down": meeting(devices=(replace(_ETH1, is_up=False),)),
    "device of another network": meeting(devices=(replace(_ETH1, addresses=("192.168.0.2",)),)),
    "InfiniBand": meeting(devices=(NetworkDevice("mlx5_0:1", exists=True, is_up=True),)),
    "too few GPUs": meeting(gpus=2),
}
