"""``trtx serve --hosts`` and ``trtx serve join``: one topology over two hosts, as a person starts and ends it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from host_answers import MODEL, PROMPTS, answer, listening
from host_shares import ServedHosts, served_hosts, services, unplanned
from host_topology import Servers
from namespaces import Hosts

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


@pytest.mark.proof
def test_nothing_listens_but_what_was_planned(disagg: ServedHosts, hosts: Hosts, servers: Servers) -> None:
    for host in hosts:
        assert unplanned(disagg.plan, host, services(host, hosts)) == set()
