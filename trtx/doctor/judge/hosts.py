"""Checks whether the hosts of a topology can find, reach and understand each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trtx.doctor.check import Check, failed, ok, warning
from trtx.doctor.host_facts import HostReport, HostsFacts, Met, TakenPort, WantedHost
from trtx.planes.fitness import EVENT_BYTES_PER_BLOCK, Unfit, judge_cluster, judge_nats
from trtx.planes.secret_files import judge_secrets

CLOCKS_WITHIN_S = 1.0
_BLOCK_TOKENS = 32  # tokens of a KV block, unless an engine config sets another size
_MUST_AGREE = ("trtx", "ai-dynamo", "ai-dynamo-runtime", "nixl", "tensorrt-llm")
_SHOWN_PORTS = 4


def judge_hosts(facts: HostsFacts) -> Iterator[Check]:
    """Yields all rows, host by host in the order of the hosts file."""
    yield from _judge_services(facts)
    yield from _judge_secrets(facts)
    yield _tell_planes(facts)
    for number, host in enumerate(facts.hosts, start=1):
        name = f"host {number}"
        if host.name == facts.this_host:
            yield ok(name, f"{host.name}, {host.address}: this machine")
            yield _judge_own_ports(name, facts.own.taken, host)
            yield from _judge_report(name, host, facts.own, facts)
        else:
            yield from _judge_met(name, host, facts.met[host.name], facts)


def _judge_services(facts: HostsFacts) -> Iterator[Check]:
    for number, (endpoint, amiss) in enumerate(judge_cluster(facts.etcd), start=1):
        name = "etcd" if len(facts.etcd) == 1 else f"etcd {number}"
        seen = f"{endpoint.version} at {endpoint.url}"
        if endpoint.answers_in_ms is not None:
            seen += f", a read takes {endpoint.answers_in_ms:.1f} ms"
        yield from _rows(name, seen, amiss)
    payload = facts.nats.max_payload_bytes
    seen = f"{facts.nats.version} at {facts.nats_url}"
    if payload is not None:
        tokens = payload // EVENT_BYTES_PER_BLOCK * _BLOCK_TOKENS
        seen += f", max_payload {payload:,}: KV events of prompts up to {tokens:,} tokens"
    yield from _rows("NATS", seen, list(judge_nats(facts.nats_url, facts.nats, context_length=None, block_tokens=None)))


def _rows(name: str, seen: str, amiss: Sequence[Unfit]) -> Iterator[Check]:
    """Yields one row with the state, or one row for each problem."""
    if not amiss:
        yield ok(name, seen)
    for number, one in enumerate(amiss):
        row = name if number == 0 else f"{name} ({number + 1})"
        make = failed if one.severity == "failed" else warning
        yield make(row, one.seen, one.expected, one.fix)


def _judge_secrets(facts: HostsFacts) -> Iterator[Check]:
    if facts.secret_files:
        seen = f"{len(facts.secret_files)} files, of this user alone"
        yield from _rows("credentials", seen, list(judge_secrets(facts.secret_files)))


def _tell_planes(facts: HostsFacts) -> Check:
    etcd = {"tls": "etcd over TLS", "password": "etcd in clear, its password too", "open": "etcd in clear"}
    nats = {"open": "", "password": ", its password too", "token": ", its token too"}
    events = "NATS over TLS" if facts.nats_url.startswith("tls:") else f"NATS in clear{nats[facts.nats_way]}"
    return ok(
        "planes",
        f"{etcd[facts.etcd_way]}; {events}; requests and answers: {facts.requests}; system ports, metrics and KV in "
        "clear",
    )


def _judge_own_ports(name: str, taken: Sequence[TakenPort], host: WantedHost) -> Check:
    row = f"{name} ports"
    others = [one for one in taken if not one.is_own]
    if others:
        held = "; ".join(f"{one.port} ({one.by})" for one in others[:_SHOWN_PORTS])
        fix = f"stop the processes that use them, or give {host.name} another first_port, and --port for HTTP"
        return failed(row, f"in use: {held}{_more(others)}", "every planned port free", fix)
    if taken:
        return ok(row, f"{len(taken)} of {len(host.ports.all)} in use, by this topology, which runs")
    return ok(row, f"{len(host.ports.all)} planned ports are free")


def _judge_met(name: str, host: WantedHost, met: Met, facts: HostsFacts) -> Iterator[Check]:
    states = met.ports
    silent = [port for port, state in states.items() if state == "silent"]
    where = f"{host.name}, {host.address}"
    if met.report is None:
        run = f"run trtx doctor --hosts there at the same time, or give --wait more than {facts.waited_s:.0f} s"
        if len(silent) == len(states):
            fix = f"start it, open its ports to this host, or correct its address; then {run}"
            yield failed(name, f"{where}: nothing answers on {len(states)} ports", "a host that answers", fix)
        else:
            seen = f"{where}: reached, and no doctor answers there: its ports, clock, versions and device are not known"
            yield warning(name, seen, "a doctor there too", run)
        return
    yield ok(name, f"{where}: its doctor answers")
    unmet = [port for port in silent if port not in {one.port for one in met.report.taken}]
    refused = [port for port, state in states.items() if state == "refused"]
    others = [one for one in met.report.taken if not one.is_own]
    row = f"{name} ports"
    if blocked := [*unmet, *(port for port in refused if port not in {one.port for one in met.report.taken})]:
        fix = f"open them on {host.name} to {facts.this_host}, in its firewall and on the way"
        yield failed(row, f"not reached from here: {_ports(blocked)}", f"all {len(states)} planned ports", fix)
    elif others:
        held = "; ".join(f"{one.port} ({one.by})" for one in others[:_SHOWN_PORTS])
        fix = f"stop the processes that use them, or give {host.name} another first_port, and --port for HTTP"
        yield failed(row, f"in use there: {held}{_more(others)}", "every planned port free", fix)
    else:
        yield ok(row, f"{len(states)} planned ports reached")
    yield _judge_clock(name, host, met)
    yield from _judge_report(name, host, met.report, facts)
    yield _judge_versions(name, host, met.report, facts.own)


def _judge_clock(name: str, host: WantedHost, met: Met) -> Check:
    row = f"{name} clock"
    assert met.ahead_s is not None  # set whenever there is a report
    off = abs(met.ahead_s)
    seen = f"{off:.3f} s {'ahead of' if met.ahead_s > 0 else 'behind'} this one's, ± {met.within_s:.3f} s"
    if off - met.within_s > CLOCKS_WITHIN_S:
        fix = f"run chrony or another NTP client on {host.name} and here: logs and certificates go by clocks"
        return warning(row, seen, f"within {CLOCKS_WITHIN_S:g} s", fix)
    return ok(row, seen)


def _judge_report(name: str, host: WantedHost, report: HostReport, facts: HostsFacts) -> Iterator[Check]:
    yield _judge_device(f"{name} device", host, report)
    if host.gpus:
        if report.gpus < host.gpus:
            fix = f"correct gpus of {host.name} in the hosts file, its driver, or CUDA_VISIBLE_DEVICES there"
            yield failed(f"{name} GPUs", f"{report.gpus} visible", f"{host.gpus}, as the hosts file says", fix)
        else:
            yield ok(f"{name} GPUs", f"{report.gpus} visible, {host.gpus} asked for")


def _judge_device(row: str, host: WantedHost, report: HostReport) -> Check:
    fix = f"correct device or address of {host.name} in the hosts file"
    for device in report.devices:
        if not device.exists:
            return failed(row, f"there is no {device.name}", "a network device of the host", fix)
        if not device.is_up:
            return failed(row, f"{device.name} is down", "one that is up", f"ip link set {device.name} up, or {fix}")
    addressed = [device for device in report.devices if device.addresses]
    if addressed and host.address not in {address for device in addressed for address in device.addresses}:
        has = ", ".join(f"{device.name} has {' and '.join(device.addresses)}" for device in addressed)
        seen = f"{host.address} is not on it: {has}"
        return warning(row, seen, "KV and all other traffic on one network", fix)
    return ok(row, f"{', '.join(device.name for device in report.devices) or 'none named'}, up")


def _judge_versions(name: str, host: WantedHost, there: HostReport, here: HostReport) -> Check:
    row = f"{name} versions"
    names = sorted(here.versions.keys() | there.versions.keys())
    differ = [one for one in names if here.versions.get(one) != there.versions.get(one)]
    if not differ:
        return ok(row, f"{len(names)} packages as here, trtx {here.versions.get('trtx', 'of its sources')}")
    told = ", ".join(
        f"{one} {there.versions.get(one, 'none')} (here {here.versions.get(one, 'none')})" for one in differ
    )
    fix = f"install the same versions on {host.name} and here"
    if any(one in _MUST_AGREE for one in differ):
        return failed(row, told, "the same versions on both hosts", fix)
    return warning(row, told, "the same versions", fix)


def _ports(ports: Sequence[int]) -> str:
    return ", ".join(map(str, ports[:_SHOWN_PORTS])) + _more(ports)


def _more(entries: Sequence[object]) -> str:
    return f" and {len(entries) - _SHOWN_PORTS} more" if len(entries) > _SHOWN_PORTS else ""
