"""A worker whose UCX device does not lead to the other host: every request is answered, and the pair is found out."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from host_topology import HostsTopology, Servers, over_hosts
from namespaces import Hosts
from processes import HTTP, until

from trtx.checkpoint import resolve_checkpoint
from trtx.launch.handoffs import HandoffProofs, WorkerPair
from trtx.topology import Plan, ProcessSpec

pytestmark = pytest.mark.proof

ASTRAY = "eth9"  # up and with an address, and nothing at its other end
TORCH: dict[str, Any] = {
    "max_seq_len": 512,
    "max_batch_size": 16,
    "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 8192},
}
DEVICES = {"prefill-0": "eth1", "decode-0": "eth1", "decode-1": ASTRAY}


@pytest.fixture(scope="module")
def running(hosts: Hosts, servers: Servers) -> Iterator[HostsTopology]:
    """Prefill on the first host, two decode workers on the second, of which the last one's device leads astray."""
    on_second = ["ip", "-n", hosts.second.namespace]
    for words in (
        f"link add {ASTRAY} type veth peer name {ASTRAY}-end",
        f"address add 10.99.0.1/24 dev {ASTRAY}",
        f"link set {ASTRAY} up",
        f"link set {ASTRAY}-end up",
    ):
        subprocess.run([*on_second, *words.split()], check=True)
    with over_hosts(hosts, "pairs", resolve_checkpoint("synthetic:tiny").path) as made:
        made.start_frontend("--migration-limit", "3")
        made.start_worker("prefill-0", role="prefill", engine="torch", **TORCH)
        with made.on(hosts.second):
            made.start_worker("decode-0", role="decode", engine="torch", **TORCH)
            made.extra_environment = {"UCX_NET_DEVICES": ASTRAY}
            made.start_worker("decode-1", role="decode", engine="torch", **TORCH)
        made.wait_ready(prefill=1, decode=2)
        yield made


def plan_of(running: HostsTopology) -> Plan:
    """As it would have been planned."""
    processes = tuple(
        ProcessSpec(
            child.name,
            child.name.partition("-")[0],  # type: ignore[arg-type]
            (),
            {"UCX_NET_DEVICES": DEVICES[child.name]},
            child.log_path,
            host=running.places[child.name].name,
        )
        for child in running.children[1:]
    )
    return Plan(
        mode="disagg", engine="torch", model=running.model_name, model_path=Path(), namespace="pairs",
        host=running.hosts.first.address, port=running.port, internal_ports=(), run_dir=Path(), scratch_dir=Path(),
        processes=processes, engine_configs={}, gpu_names=(), reasons=(),
    )  # fmt: skip


def test_the_pair_whose_devices_do_not_meet_is_named_with_its_cause_and_the_other_is_proved(
    running: HostsTopology,
) -> None:
    proofs = HandoffProofs(plan_of(running), running.url)
    ids = proofs.worker_ids()
    assert ids.keys() == DEVICES.keys(), "of both hosts"
    said = proofs.prove_missing(ids, 60)
    assert said is not None
    for words in (
        "no KV came from prefill-0 (on node1, UCX_NET_DEVICES=eth1) to decode-1 (on node2, UCX_NET_DEVICES=eth9)",
        "can't be reached over NIXL",
        "UCX says: no active messages transport",
        "no route to 10.77.0.1",
        "correct the device of node1 and of node2 in the hosts file",
    ):
        assert words in said
    assert proofs.missing(ids) == (WorkerPair("prefill-0", "decode-1"),)


def test_its_requests_are_answered_and_counted_as_recomputed_by_pair(running: HostsTopology) -> None:
    _, _, good, astray = running.children
    recomputed = 'trtx_pair_handoffs_total{outcome="recomputed",prefill="prefill-0"'
    before = running.metric(astray, recomputed)
    for number in range(4):  # the decode workers are taken in turn
        body = {"model": running.model_name, "prompt": f"{number} is a number", "max_tokens": 4, "ignore_eos": True}
        assert HTTP.post(f"{running.url}/v1/completions", json=body, timeout=60).status_code == 200
    for worker in (good, astray):  # which count a request after its client has the answer
        until("it is counted", lambda one=worker: running.metric(one, "trtx_open_requests") == 0, seconds=30)  # type: ignore[misc]
    assert running.metric(astray, recomputed) - before == 2
    assert running.metric(astray, "trtx_recomputed_prefixes_total") >= 2
    assert running.metric(astray, "trtx_pair_handoff_bytes_total") == 0
    assert running.metric(good, "trtx_recomputed_prefixes_total") == 0
    assert running.metric(good, "trtx_pair_handoff_bytes_total") > 0

    def told() -> bool:
        so_far = astray.status()["handoffs"]
        return bool(so_far["recomputed"] >= 2 and "can't be reached over NIXL" in so_far["because"])

    until("its status file says so", told, seconds=10)
