"""``trtx serve --hosts`` behind the KV-aware router: it knows the prefixes of both hosts as of one machine."""

from __future__ import annotations

import contextlib

import pytest
from host_answers import BEST_HIT_RATE, MODEL, hit_rate
from host_shares import served_hosts, services, unplanned
from host_topology import Servers
from namespaces import Hosts
from topology_clients import trtx_serve

pytestmark = pytest.mark.proof


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
            if name == "two hosts":
                assert not any(unplanned(plan, host, services(host, hosts)) for host in hosts)
    print(f"prefix hit rate on one machine {found[0]:.3f}, over two hosts {found[1]:.3f}, at most {BEST_HIT_RATE:.3f}")
    assert found[1] >= found[0] - 0.03
    assert found[1] > 0.9 * BEST_HIT_RATE
