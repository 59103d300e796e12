"""Planning over hosts: where workers go, what listens where, and one host's share of it. Pure."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trtx.config import ResolvedEngineConfig, Role, TopologySpec
from trtx.config.hosts import HostSpec, HostsSpec
from trtx.errors import UsageError
from trtx.topology import Gpu, Machine, Plan, plan_hosts, settle, with_roles
from trtx.topology.host_placement import place_on_hosts
from trtx.topology.workers import Worker


@dataclass(frozen=True)
class Model:
    path: Path = Path("/models/tiny")
    served_model_name: str = "tiny"


def hosts_of(*hosts: dict[str, Any], **fields: Any) -> HostsSpec:
    """node1, node2 … with ``hosts`` over what they have by themselves."""
    own = [
        {"name": f"node{number}", "address": f"10.0.0.{number}", "device": "eth1"} | host
        for number, host in enumerate(hosts, 1)
    ]
    return HostsSpec.model_validate(
        {"etcd": ["http://10.0.0.1:2379"], "nats": "nats://10.0.0.1:4222", **fields, "hosts": own}
    )


def plan_of(hosts: HostsSpec, *, engine: str = "torch", tp: dict[Role, int] | None = None, **spec: Any) -> Plan:
    """``tp``: by role, where an engine takes several GPUs."""
    asked = with_roles(TopologySpec(**spec), hosts)
    sizes = tp or {}
    configs: dict[Role, ResolvedEngineConfig] = {
        role: ResolvedEngineConfig(role, {"tensor_parallel_size": sizes.get(role, 1)}, "test", ())
        for role in asked.roles
    }
    return plan_hosts(
        asked,
        hosts,
        checkpoint=Model(),
        engine=engine,
        engine_configs=configs,
        namespace="trtx-test",
        run_dir=Path("/runs/one"),
        scratch_dir=Path("/scratch"),
        engine_version="1.3.0" if engine == "tensorrt-llm" else None,
    )


def where(plan: Plan) -> dict[str, str]:
    return {worker.name: worker.host for worker in plan.workers}


@st.composite
def packable(draw: st.DrawFn) -> tuple[list[HostSpec], list[Worker]]:
    """Hosts, and workers of one or two sizes that were dealt out to them: so there is a way in which all fit."""
    rooms = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    sizes: dict[Role, int] = {"prefill": draw(st.integers(1, 4)), "decode": draw(st.integers(1, 4))}
    counts: Counter[Role] = Counter()
    for room in rooms:
        left = room
        for role in draw(st.lists(st.sampled_from(["prefill", "decode"]), max_size=8)):
            if sizes[role] <= left:  # type: ignore[index]
                left -= sizes[role]  # type: ignore[index]
                counts[role] += 1  # type: ignore[index]
    assume(counts["prefill"] and counts["decode"])
    workers = [
        Worker(role, f"{role}-{index}", sizes[role])
        for index in range(max(counts.values()))
        for role in sizes
        if index < counts[role]
    ]
    hosts = [HostSpec(name=f"n{number}", address=f"10.0.0.{number}", gpus=room) for number, room in enumerate(rooms, 1)]
    return hosts, workers


@given(packable())
def test_workers_that_fit_in_some_way_are_placed_and_no_gpu_of_a_host_serves_two(
    asked: tuple[list[HostSpec], list[Worker]],
) -> None:
    hosts, workers = asked
    placed = place_on_hosts(hosts, workers)
    assert [one.worker for one in placed] == workers
    used = [(one.host, gpu) for one in placed for gpu in one.gpus]
    assert len(used) == len(set(used)) == sum(worker.gpu_count for worker in workers)
    assert all(len(one.gpus) == one.worker.gpu_count for one in placed)
    there = {(host.name, gpu) for host in hosts for gpu in host.gpu_indices}
    assert set(used) <= there


@given(st.integers(1, 4), st.integers(1, 8), st.data())
def test_roles_are_balanced_where_every_host_has_room_for_whole_pairs(
    count: int, pairs_a_host: int, data: st.DataObject
) -> None:
    pairs = data.draw(st.integers(1, count * pairs_a_host))
    hosts = [HostSpec(name=f"n{n}", address=f"10.0.0.{n + 1}", gpus=2 * pairs_a_host) for n in range(count)]
    workers = [Worker(role, f"{role}-{n}", 1) for n in range(pairs) for role in ("prefill", "decode")]
    placed = {one.worker.name: one.host for one in place_on_hosts(hosts, workers)}
    assert all(placed[f"prefill-{n}"] == placed[f"decode-{n}"] for n in range(pairs))  # KV goes over NVLink
    loads = Counter(placed[f"prefill-{n}"] for n in range(pairs))
    assert max(loads.values()) - min(loads.get(host.name, 0) for host in hosts) <= 1


def test_a_pair_that_no_host_has_room_for_is_parted() -> None:
    plan = plan_of(
        hosts_of({"gpus": 4}, {"gpus": 2}), engine="tensorrt-llm", mode="disagg", tp={"prefill": 4, "decode": 2}
    )
    assert where(plan) == {"prefill-0": "node1", "decode-0": "node2"}


def test_workers_of_several_gpus_hand_off_kv_within_one_host() -> None:
    sizes = {"prefill": 2, "decode": 1}
    with pytest.raises(UsageError, match="prefill asks for 2 GPUs per worker.*within one host only.*run on 2 hosts"):
        plan_of(hosts_of({"gpus": 2}, {"gpus": 1}), mode="disagg", tp=sizes)
    assert len(plan_of(hosts_of({"gpus": 3}), mode="disagg", tp=sizes).workers) == 2


def test_gpus_are_taken_in_the_order_in_which_a_host_names_them() -> None:
    plan = plan_of(hosts_of({"gpus": [5, 2]}, {"gpus": [0], "roles": None}), workers=3)
    assert {one.name: (one.host, one.gpu_indices) for one in plan.workers} == {
        "agg-0": ("node1", (5,)), "agg-1": ("node1", (2,)), "agg-2": ("node2", (0,)),
    }  # fmt: skip
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in plan.workers] == ["5", "2", "0"]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_everything_listens_on_its_hosts_address_and_no_port_of_a_host_is_planned_twice(
    workers: list[int], frontends: list[int]
) -> None:
    fields = [{"roles": {"agg": one}, "frontends": two} for one, two in zip(workers, frontends, strict=False)]
    assume(
        sum(workers)
        and sum(one["frontends"] for one in fields)
        and all(a or b for a, b in zip(workers, frontends, strict=False))
    )
    hosts = hosts_of(*fields)
    plan = plan_of(hosts, engine="paced")
    assert len({process.name for process in plan.processes}) == len(plan.processes)
    for host in hosts.hosts:
        there = plan.share(host.name).processes
        ports = [port for process in there for port in process.ports.values()]
        ports += [process.http_port for process in there if process.http_port is not None]
        ports += [port for process in there if process.kv_ports for port in range(*process.kv_ports)]
        assert len(ports) == len(set(ports))
        for process in there:
            assert process.address == host.address == process.env["DYN_TCP_RPC_HOST"]
            assert process.env["DYN_TCP_RPC_PORT"] == str(process.request_port)
            assert process.env["DYN_TCP_RESPONSE_STREAM_HOST"] == host.address
            assert process.env["TRTX_TOPOLOGY"] == f"trtx-test.{host.name}"
            assert "DYN_TCP_REQUEST_TIMEOUT" not in process.env, "Dynamo's 5 s: by them a cut link is noticed"
            assert process.env.get("DYN_SYSTEM_HOST", host.address) == host.address
            assert process.env.get("UCX_NET_DEVICES", "eth1") == "eth1"
            assert "DYN_FILE_KV" not in process.env
            assert (process.system_port or 0) <= 32767
    assert sorted(one.name for host in hosts.hosts for one in plan.share(host.name).processes) == sorted(
        one.name for one in plan.processes
    )


def test_a_plan_over_hosts_and_its_shares_survive_json() -> None:
    auth = {"username": "trtx", "password_file": Path("/secrets/password")}
    hosts = hosts_of({"gpus": 2}, {"gpus": [1, 3]}, etcd_auth=auth, nats_auth={"token_file": Path("/secrets/token")})
    plan = plan_of(hosts, mode="disagg", prefill=2, decode=2, router_mode="kv")
    for one in (plan, plan.share("node1"), plan.share("node2")):
        assert Plan.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert plan == plan_of(hosts, mode="disagg", prefill=2, decode=2, router_mode="kv")


def test_a_plan_of_version_1_is_read_as_one_machines() -> None:
    plan = plan_of(hosts_of({"roles": {"agg": 1}}), engine="paced")
    document = plan.to_json() | {"schema_version": 1}
    for name in ("discovery", "hosts", "this_host", "etcd", "nats"):
        document.pop(name)
    for process in document["processes"]:
        for name in ("host", "address", "http_host", "http_port", "request_port", "response_port", "kv_ports"):
            process.pop(name)
    read = Plan.from_json(json.loads(json.dumps(document)))
    assert read.discovery == "file" and read.urls == (f"http://10.0.0.1:{plan.port}",)


def test_frontends_are_one_on_the_first_host_unless_it_is_said_otherwise() -> None:
    assert [one.host for one in plan_of(hosts_of({"gpus": 1}, {"gpus": 1}), workers=2).frontends] == ["node1"]
    several = plan_of(hosts_of({"gpus": 1, "frontends": 2}, {"gpus": 1, "frontends": 1}), workers=2, router_mode="kv")
    assert several.urls == ("http://10.0.0.1:8000", "http://10.0.0.1:8001", "http://10.0.0.2:8000")
    assert [one.name for one in several.frontends] == ["frontend-0", "frontend-1", "frontend-2"]
    assert all("--router-replica-sync" in one.argv for one in several.frontends)


def test_what_is_too_much_for_the_hosts_is_said_with_what_they_have() -> None:
    with pytest.raises(UsageError, match="4 workers need 4 GPUs, but the hosts have 3"):
        plan_of(hosts_of({"gpus": 2}, {"gpus": 1}), workers=4)
    with pytest.raises(UsageError, match=r"needs 4 GPUs, but no host has more than 2; .*trtx export slurm"):
        plan_of(hosts_of({"gpus": 2}, {"gpus": 2}), engine="tensorrt-llm", tp={"agg": 4})
    with pytest.raises(UsageError, match="their sizes don't fit"):
        plan_of(hosts_of({"gpus": 3}, {"gpus": 3}), engine="tensorrt-llm", workers=3, tp={"agg": 2})
    with pytest.raises(UsageError, match="node2 has 1 GPUs, but its workers need 2"):
        plan_of(hosts_of({"gpus": 1, "roles": {"agg": 1}}, {"gpus": 1, "roles": {"agg": 2}}))
    with pytest.raises(UsageError, match="no host has a decode worker"):
        plan_of(hosts_of({"roles": {"prefill": 1}}, {"roles": {"prefill": 1}}), mode="disagg")
    with pytest.raises(UsageError, match="no host has an agg worker"):
        plan_of(hosts_of({"roles": {"agg": 0}}, {"roles": {"agg": 0}}))
    with pytest.raises(UsageError, match="engine tensorrt-llm needs a GPU, but node2 has none"):
        plan_of(hosts_of({"gpus": 1, "roles": {"agg": 1}}, {"roles": {"agg": 1}}), engine="tensorrt-llm")
    with pytest.raises(UsageError, match="node2 has no gpus but other hosts have some"):
        plan_of(hosts_of({"gpus": 1, "roles": {"agg": 1}}, {"roles": {"agg": 1}}))


def machine(gpus: int) -> Machine:
    return Machine(tuple(Gpu(index, f"GPU-{index:04x}", "Test GPU", 80 << 30) for index in range(gpus)), 8)


def test_a_settled_share_has_this_machines_paths_gpus_and_threads_and_the_plans_ports() -> None:
    plan = plan_of(hosts_of({"gpus": 2}, {"gpus": [1, 0]}), mode="disagg", prefill=2, decode=2)
    share = plan.share("node2")
    there = {"model_path": Path("/data/model"), "run_dir": Path("/home/one"), "scratch_parent": Path("/var/tmp")}
    settled = settle(share, machine(2), **there)
    assert settled.scratch_dir == Path("/var/tmp/trtx-test.node2")
    assert settled.marker == "TRTX_TOPOLOGY=trtx-test.node2"
    for before, after in zip(share.processes, settled.processes, strict=True):
        words = [*after.argv, *after.env.values(), str(after.log_path), str(after.status_file)]
        assert not [word for word in words if "/runs/one" in word or "/models/tiny" in word or "/scratch" in word]
        assert after.ports == before.ports and after.gpu_indices == before.gpu_indices
        assert f"--name {after.name}" in " ".join(after.argv)
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in settled.workers] == ["GPU-0001", "GPU-0000"]
    assert settled.gpu_names == ("Test GPU", "Test GPU")
    with pytest.raises(UsageError, match=r"gives GPU 1 of node2 to \w+-1, but 0 are visible here"):
        settle(share, machine(1), **there)
    on_cpu = plan_of(hosts_of({"roles": {"agg": 1}}, {"roles": {"agg": 2}})).share("node2")
    assert {one.env["OMP_NUM_THREADS"] for one in settle(on_cpu, machine(0), **there).workers} == {"2"}


def test_no_share_has_what_another_one_has() -> None:
    plan = plan_of(
        hosts_of({"gpus": 3, "frontends": 1}, {"gpus": 3, "frontends": 1}), mode="disagg", prefill=2, decode=3
    )
    shares = [plan.share(host.name) for host in plan.hosts]
    for one, other in itertools.combinations(shares, 2):
        assert not {process.name for process in one.processes} & {process.name for process in other.processes}
        assert one.marker != other.marker
    assert sum(share.gpu_count for share in shares) == plan.gpu_count == 5
    with pytest.raises(ValueError, match="node9"):
        plan.share("node9")


@pytest.mark.parametrize(("first_port", "taken"), [(2379, "2379"), (2375, "2379"), (4220, "4222")])
def test_no_process_gets_a_port_that_etcd_or_nats_has(first_port: int, taken: str) -> None:
    roles = {"roles": {"agg": 1}}
    with pytest.raises(UsageError, match=rf"port {taken} of node1 is used by \w+://10\.0\.0\.1:{taken}.*first_port"):
        plan_of(hosts_of({"first_port": first_port, **roles}, roles), workers=2)
    plan_of(hosts_of(roles, {"first_port": first_port, **roles}), workers=2)  # they are on the other host
