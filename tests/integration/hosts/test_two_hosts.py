"""Two hosts over etcd, TCP and NATS: one machine's tokens, KV handed across, and nothing open that is not needed."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from host_topology import HostsTopology, Planes, over_hosts
from namespaces import Host, Hosts
from processes import HTTP, until
from services import ETCD_PEER_PORT, ETCD_PORT, NATS_PORT

from trtx.checkpoint import resolve_checkpoint
from trtx.torch_engine.llmapi import LLM, SamplingParams

BLOCK = 16
TORCH: dict[str, Any] = {
    "max_seq_len": 512,
    "max_batch_size": 16,
    "kv_cache_config": {"tokens_per_block": BLOCK, "max_tokens": 8192},
}
NEW_TOKENS = 20
PROMPTS = [
    [(seed * 31 + at * 13) % 1000 + 5 for at in range(length)] for seed, length in enumerate((1, 16, 33, 90, 300))
]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What one engine says to each prompt, in a process of this machine."""
    engine = LLM("synthetic:tiny", **TORCH)
    try:
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        return [engine.generate_async(prompt, params).result(timeout=60).outputs[0].token_ids for prompt in PROMPTS]
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def disagg(hosts: Hosts, servers: Planes) -> Iterator[HostsTopology]:
    """Prefill beside the frontend, decode on the other host."""
    with over_hosts(hosts, "disagg", resolve_checkpoint("synthetic:tiny").path) as running:
        running.start_frontend("--migration-limit", "3")
        running.start_worker("prefill-0", role="prefill", engine="torch", **TORCH)
        with running.on(hosts.second):
            running.start_worker("decode-0", role="decode", engine="torch", **TORCH)
        running.wait_ready(prefill=1, decode=1)
        yield running


@pytest.fixture
def agg(hosts: Hosts, servers: Planes) -> Iterator[HostsTopology]:
    """A worker on each host."""
    with over_hosts(hosts, "agg", resolve_checkpoint("synthetic:tiny").path) as running:
        running.start_frontend("--router-mode", "round-robin")
        for number, host in enumerate(hosts):
            with running.on(host):
                running.start_worker(f"agg-{number}", engine="torch", **TORCH)
        running.wait_ready(aggregated=2)
        yield running


def answer(running: HostsTopology, prompt: list[int]) -> list[int]:
    """The ids of an answer's tokens."""
    body = {"model": running.model_name, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    said = HTTP.post(f"{running.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    return [int(token.removeprefix("token_id:")) for token in said["choices"][0]["logprobs"]["tokens"]]


def listening(host: Host) -> dict[int, list[tuple[str, int]]]:
    """Process -> address and port of each of its sockets on a host, TCP and UDP, on which something is waited for."""
    found: dict[int, list[tuple[str, int]]] = {}
    with host.entered():
        for protocol in ("-t", "-u"):
            argv = ["ss", "-Hlnp", protocol]
            for line in subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines():
                address, _, port = line.split()[3].rpartition(":")
                for pid in re.findall(r"pid=(\d+)", line) or ["0"]:
                    found.setdefault(int(pid), []).append((address, int(port)))
    return found


def test_prefill_here_and_decode_there_say_what_one_engine_says(
    disagg: HostsTopology, hosts: Hosts, expected: list[list[int]]
) -> None:
    prefill, decode = disagg.children[1:]
    before = hosts.second.received_bytes()
    assert [answer(disagg, prompt) for prompt in PROMPTS] == expected
    handed = disagg.metric(decode, "trtx_handoff_bytes_total")
    assert handed > 0
    assert disagg.metric(decode, "trtx_recomputed_prefixes_total") == 0
    assert hosts.second.received_bytes() - before > handed, "the KV went over the link"
    until("every lease is released", lambda: disagg.metric(prefill, "trtx_leases") == 0, seconds=10)


def test_nothing_listens_but_what_is_known_on_its_hosts_address(
    disagg: HostsTopology, hosts: Hosts, servers: Planes
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


def test_a_worker_on_each_host_says_what_one_engine_says(agg: HostsTopology, expected: list[list[int]]) -> None:
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert [answer(agg, prompt) for _ in range(4)] == [tokens] * 4
    served = [agg.metric(worker, 'trtx_requests_total{outcome="length"') for worker in agg.children[1:]]
    assert served == [10, 10], "both hosts served"
