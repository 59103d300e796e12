"""Two hosts over etcd, TCP and NATS, set by hand: one machine's tokens, KV handed across, no socket too many."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_answers import BEST_HIT_RATE, BLOCK, MODEL, PROMPTS, TORCH, answer, hit_rate, listening
from host_servers import ETCD_PEER_PORT, ETCD_PORT, NATS_PORT
from host_topology import HostsTopology, Servers, over_hosts
from namespaces import Hosts
from processes import topology, until

from trtx.checkpoint import resolve_checkpoint
from trtx.topology.commands import KV_ROUTER_FLAGS

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def disagg(hosts: Hosts, servers: Servers) -> Iterator[HostsTopology]:
    """Prefill beside the frontend, decode on the other host."""
    with over_hosts(hosts, "disagg", resolve_checkpoint(MODEL).path) as running:
        running.start_frontend("--migration-limit", "3")
        running.start_worker("prefill-0", role="prefill", engine="torch", **TORCH)
        with running.on(hosts.second):
            running.start_worker("decode-0", role="decode", engine="torch", **TORCH)
        running.wait_ready(prefill=1, decode=1)
        yield running


@contextlib.contextmanager
def agg(hosts: Hosts, *frontend_flags: str) -> Iterator[HostsTopology]:
    """A worker on each host."""
    with over_hosts(hosts, "agg", resolve_checkpoint(MODEL).path) as running:
        running.start_frontend(*frontend_flags)
        for number, host in enumerate(hosts):
            with running.on(host):
                running.start_worker(f"agg-{number}", engine="torch", **TORCH)
        running.wait_ready(aggregated=2)
        yield running
    shutil.rmtree(running.directory)


def test_prefill_here_and_decode_there_say_what_one_engine_says(
    disagg: HostsTopology, hosts: Hosts, expected: list[list[int]]
) -> None:
    prefill, decode = disagg.children[1:]
    before = hosts.second.received_bytes()
    assert [answer(disagg.url, disagg.model_name, prompt) for prompt in PROMPTS] == expected
    handed = disagg.metric(decode, "trtx_handoff_bytes_total")
    assert handed > 0
    assert disagg.metric(decode, "trtx_recomputed_prefixes_total") == 0
    assert hosts.second.received_bytes() - before > handed, "the KV went over the link"
    until("every lease is released", lambda: disagg.metric(prefill, "trtx_leases") == 0, seconds=10)


def test_nothing_listens_but_what_is_known_on_its_hosts_address(
    disagg: HostsTopology, hosts: Hosts, servers: Servers
) -> None:
    frontend, prefill, decode = disagg.children
    assert servers.etcd.process is not None and servers.nats.process is not None
    first, second = listening(hosts.first), listening(hosts.second)
    for host, sockets in ((hosts.first, first), (hosts.second, second)):
        assert {address for found in sockets.values() for address, _ in found} == {host.address}
    ports = {pid: {port for _, port in found} for pid, found in (first | second).items()}
    engines = {worker.name: worker.status()["ranks"][0]["pid"] for worker in (prefill, decode)}
    known = {servers.etcd.process.pid, servers.nats.process.pid, frontend.process.pid}
    known |= {prefill.process.pid, decode.process.pid, *engines.values()}
    assert ports.keys() == known
    assert ports[servers.etcd.process.pid] == {ETCD_PORT, ETCD_PEER_PORT}
    assert ports[servers.nats.process.pid] == {NATS_PORT}
    # Besides its HTTP port, one where workers send answers to; besides its system port, one that takes requests; UCX's.
    assert disagg.port in ports[frontend.process.pid] and len(ports[frontend.process.pid]) == 2
    for worker in (prefill, decode):
        assert worker.system_port in ports[worker.process.pid] and len(ports[worker.process.pid]) == 2
        assert len(ports[engines[worker.name]]) == 1


def test_a_worker_on_each_host_says_what_one_engine_says(
    hosts: Hosts, servers: Servers, expected: list[list[int]]
) -> None:
    with agg(hosts, "--router-mode", "round-robin") as running:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert [answer(running.url, running.model_name, prompt) for _ in range(4)] == [tokens] * 4
        workers = running.children[1:]
        # A worker counts a request after its client has the answer.
        until(
            "all is counted", lambda: all(running.metric(one, "trtx_open_requests") == 0 for one in workers), seconds=30
        )
        served = [running.metric(worker, 'trtx_requests_total{outcome="length"') for worker in workers]
    assert served == [10, 10], "both hosts served"


def test_the_router_knows_the_prefixes_of_both_hosts_as_of_one(hosts: Hosts, servers: Servers, tmp_path: Path) -> None:
    flags = ("--router-mode", "kv", "--kv-cache-block-size", str(BLOCK), *KV_ROUTER_FLAGS)
    with topology(tmp_path, resolve_checkpoint(MODEL).path) as one_machine:
        one_machine.start_frontend(*flags)
        for number in range(2):
            one_machine.start_worker(f"agg-{number}", engine="torch", **TORCH)
        one_machine.wait_ready(aggregated=2)
        workers = one_machine.children[1:]
        metrics = [f"http://127.0.0.1:{worker.system_port}/metrics" for worker in workers]
        on_one = hit_rate(one_machine.url, one_machine.model_name, metrics)
    with agg(hosts, *flags) as running:
        workers = running.children[1:]
        metrics = [f"http://{running.places[worker.name].address}:{worker.system_port}/metrics" for worker in workers]
        over_two = hit_rate(running.url, running.model_name, metrics)
    print(f"prefix hit rate on one machine {on_one:.3f}, over two hosts {over_two:.3f}, at most {BEST_HIT_RATE:.3f}")
    assert over_two >= on_one - 0.03
    assert over_two > 0.9 * BEST_HIT_RATE
