"""``trtx serve --hosts`` and ``trtx serve join``: one topology over two hosts, as a person starts and ends it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from host_answers import BEST_HIT_RATE, MODEL, PROMPTS, answer, hit_rate, listening
from host_servers import ETCD_PEER_PORT, ETCD_PORT, NATS_PORT
from host_shares import ServedHosts, served_hosts
from host_topology import Servers
from namespaces import Hosts
from topology_clients import trtx_serve

from trtx.planes.etcd import Etcd


@pytest.fixture(scope="module")
def disagg(hosts: Hosts, servers: Servers) -> Iterator[ServedHosts]:
    """Prefill beside the frontend, decode on the other host."""
    arguments = ("--engine", "torch", "--model", MODEL, "--mode", "disagg")
    roles = {"node1": {"roles": {"prefill": 1}}, "node2": {"roles": {"decode": 1}}}
    with served_hosts(hosts, servers, hosts.directory / "served", *arguments, **roles) as served:
        yield served
        with hosts.first.entered():
            etcd = Etcd([servers.etcd.url])
            assert etcd.range("v1/", is_prefix=True) and etcd.range("trtx/", is_prefix=True)
    with hosts.first.entered():
        assert etcd.range("v1/", is_prefix=True) == etcd.range("trtx/", is_prefix=True) == (), (
            "the end of both shares leaves no key"
        )
    assert all(listening(host).keys() <= servers.pids() for host in hosts)


def test_prefill_here_and_decode_there_say_what_one_engine_says(
    disagg: ServedHosts, hosts: Hosts, expected: list[list[int]]
) -> None:
    handed, received = disagg.metric("decode-0", "trtx_handoff_bytes_total"), hosts.second.received_bytes()
    assert handed > 0, "before it was ready a handoff was proved"
    assert [answer(disagg.plan.url, disagg.plan.model, prompt) for prompt in PROMPTS] == expected
    handed = disagg.metric("decode-0", "trtx_handoff_bytes_total") - handed
    assert handed > 0
    assert hosts.second.received_bytes() - received > handed, "the KV went over the link"
    assert disagg.metric("decode-0", "trtx_recomputed_prefixes_total") == 0


def test_nothing_listens_but_what_was_planned(disagg: ServedHosts, hosts: Hosts, servers: Servers) -> None:
    plan = disagg.plan
    for host in hosts:
        found = [pair for sockets in listening(host).values() for pair in sockets]
        assert {address for address, _ in found} == {host.address}
        here = plan.share(host.name).processes
        planned = {port for process in here for port in process.ports.values()}
        planned |= {process.http_port for process in here if process.http_port is not None}
        planned |= {ETCD_PORT, ETCD_PEER_PORT, NATS_PORT} if host == hosts.first else set()
        of_kv = {port for one in here if one.kv_ports for port in range(one.kv_ports[0], one.kv_ports[1] + 1)}
        ports = {port for _, port in found}
        # Without routing by prefix Dynamo's frontend opens no port for requests.
        unused = {process.request_port for process in here if process.role == "frontend"}
        assert planned - unused <= ports - of_kv <= planned
        assert len(ports & of_kv) == len([process for process in here if process.kv_ports])


@pytest.mark.proof
def test_the_router_knows_the_prefixes_of_both_hosts_as_of_one(hosts: Hosts, servers: Servers) -> None:
    arguments = ("--engine", "torch", "--model", MODEL, "--workers", "2", "--router-mode", "kv")
    arguments += ("--set", "kv_cache_config.tokens_per_block=16")
    found = []
    for name in ("one machine", "two hosts"):
        with contextlib.ExitStack() as stack:
            if name == "one machine":
                plan = stack.enter_context(trtx_serve(*arguments)).wait_ready()
            else:
                plan = stack.enter_context(served_hosts(hosts, servers, hosts.directory / "kv", *arguments)).plan
            metrics = [f"http://{worker.address}:{worker.system_port}/metrics" for worker in plan.workers]
            found.append(hit_rate(plan.url, plan.model, metrics))
    print(f"prefix hit rate on one machine {found[0]:.3f}, over two hosts {found[1]:.3f}, at most {BEST_HIT_RATE:.3f}")
    assert found[1] >= found[0] - 0.03
    assert found[1] > 0.9 * BEST_HIT_RATE
