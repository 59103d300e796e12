"""A plan over hosts in a real etcd: who finds it, what has to be the same where it is joined, and when it goes; and
which hosts are taken out of the routing by the others."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from processes import until
from services import etcd

from trtx.checkpoint import resolve_checkpoint
from trtx.cli.serving import serve_hosts
from trtx.config import TopologySpec
from trtx.config.hosts import HostsSpec
from trtx.errors import UsageError
from trtx.launch import find_published, name_of, prepare_hosts, publishing
from trtx.launch.discovery import open_etcd
from trtx.launch.events import Event
from trtx.launch.host_preparation import plan_again
from trtx.launch.presence import LOST_AFTER_S, SharePresence
from trtx.launch.published import Published, PublishedInputs
from trtx.planes.etcd import Etcd
from trtx.planes.etcd_registry import EtcdRegistry
from trtx.topology import Plan, PlannedHost

MODEL = "synthetic:tiny-trained"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with etcd(tmp_path_factory.mktemp("etcd")) as service:
        yield service.url


@dataclass(frozen=True)
class Prepared:
    """Of two hosts, the second one a name alone: the planner lets none share a machine."""

    plan: Plan
    asked: PublishedInputs

    @property
    def published(self) -> Published:
        return Published.of(self.asked, self.plan.model_path)

    def publishing(self, host: str = "node1", **changes: Any) -> AbstractContextManager[SharePresence]:
        return publishing(self.plan, replace(self.published, asked=replace(self.asked, **changes)), host)

    def client(self) -> Etcd:
        assert self.plan.etcd is not None
        return open_etcd(self.plan.etcd)

    def register(self, address: str) -> int:
        """A worker of its topology, as Dynamo 1.4.2 writes one. Its lease."""
        with self.client() as client:
            lease = client.grant(600)
            record = {"endpoint": "generate", "component": "backend", "instance_id": lease}
            record |= {"transport": {"tcp": f"{address}:17002/{lease:x}/generate"}}
            key = f"v1/instances/{self.plan.namespace}/backend/generate/{lease:x}"
            client.put(key, json.dumps(record).encode(), lease=lease)
        return lease

    def registered(self) -> set[str]:
        """Addresses at which workers are."""
        with self.client() as client:
            return {one.host for one in EtcdRegistry(client, self.plan.namespace, lease_ttl_s=600).instances()}


OTHER = {"engine_configs": {"agg": {"max_batch_size": 7}}}


@pytest.fixture
def prepared(url: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Prepared]:
    name = f"t{abs(hash(request.node.name)) % 10**8}"
    hosts = HostsSpec.model_validate(
        {
            "name": name,
            "etcd": [url],
            "nats": "nats://127.0.0.1:4222",
            "lease_ttl_s": 5,
            "hosts": [{"name": "node1", "address": "127.0.0.1", "device": "lo"}],
        }
    )
    spec = TopologySpec(engine="paced", model=MODEL)
    planned, asked = prepare_hosts(spec, hosts, run_dir=tmp_path / "run")
    assert asked.model == MODEL and name_of(planned) == name
    yield Prepared(replace(planned, hosts=(*planned.hosts, PlannedHost("node2", "127.0.0.2", "lo"))), asked)
    with Etcd([url]) as client:
        assert client.range(f"trtx/topologies/{name}/", is_prefix=True) == ()


@pytest.fixture
def plan(prepared: Prepared) -> Plan:
    return prepared.plan


def find(plan: Plan) -> Any:
    assert plan.etcd is not None
    return find_published(plan.etcd, name_of(plan))


def test_what_is_published_is_found_while_it_is_served_and_makes_the_same_plan(
    prepared: Prepared, tmp_path: Path
) -> None:
    plan = prepared.plan
    with prepared.publishing():
        found = find(plan)
        assert found == Published.of(prepared.asked, plan.model_path)
        path = found.check_here(None)
        assert path == resolve_checkpoint(MODEL).path
        again = plan_again(found.asked, model_path=path, this_host=None, run_dir=tmp_path / "run")
        assert again.processes == plan.processes and again.engine_configs == plan.engine_configs
        assert (again.etcd, again.nats, again.model) == (plan.etcd, plan.nats, plan.model)
    with pytest.raises(UsageError, match="no topology of that name is planned in etcd"):
        find(plan)


def test_it_stays_for_the_shares_that_go_on_and_goes_with_the_last_of_them(prepared: Prepared) -> None:
    with prepared.publishing("node2"):  # one that joined
        with prepared.publishing():
            pass
        assert find(prepared.plan).asked == prepared.asked
    with pytest.raises(UsageError, match="no topology of that name"):
        find(prepared.plan)


def test_another_plan_of_that_name_is_refused_while_one_is_served_and_the_same_is_not(prepared: Prepared) -> None:
    with prepared.publishing("node2"):
        with pytest.raises(UsageError, match="is already served with another plan"), prepared.publishing(**OTHER):
            pass
        assert find(prepared.plan).asked == prepared.asked
        with prepared.publishing(model="/where/it/lies/there"):
            assert find(prepared.plan).asked == prepared.asked


def test_what_nobody_serves_any_more_is_old_and_so_is_what_is_registered_of_it(prepared: Prepared) -> None:
    with prepared.client() as client:
        client.put(f"trtx/topologies/{name_of(prepared.plan)}/plan", b"of a host that lost its power")
        client.put(f"trtx/topologies/{name_of(prepared.plan)}/shares/node1", b"")  # of this host, cut off as well
    own, others = prepared.register("127.0.0.1"), prepared.register("127.0.0.2")
    with prepared.publishing():
        assert find(prepared.plan).asked == prepared.asked
        with prepared.client() as client:
            assert client.lease(others) is None
            assert client.revoke(own)  # its own share looks at those


def test_what_etcd_lost_is_put_there_again_by_who_runs_and_holds_for_who_starts(prepared: Prepared) -> None:
    told: list[Event] = []
    prefix = f"trtx/topologies/{name_of(prepared.plan)}/"
    with prepared.publishing("node2") as presence, prepared.client() as client:
        leases: list[int] = []
        presence.tell(told.append, leases.append)
        client.delete(f"{prefix}plan")
        until("the plan alone is there again", lambda: client.get(f"{prefix}plan"))
        client.revoke(leases[0])
        client.delete(prefix, is_prefix=True)
        until(
            "all of it is, on another lease",
            lambda: (
                len(client.range(prefix, is_prefix=True)) == 2
                and leases[-1] != leases[0]
                and client.lease(leases[-1]) is not None
            ),
        )
        with prepared.publishing():
            assert find(prepared.plan).asked == prepared.asked
        with pytest.raises(UsageError, match="is already served with another plan"), prepared.publishing(**OTHER):
            pass
        until("that is told", lambda: bool(told))
        assert all("etcd had lost the share of node2, which is registered again" in one.message for one in told)


def test_who_finds_another_plan_in_its_place_says_so_once(prepared: Prepared) -> None:
    told: list[Event] = []
    with prepared.publishing("node2") as presence, prepared.client() as client:
        leases: list[int] = []
        presence.tell(told.append, leases.append)
        with contextlib.ExitStack() as stack:
            for _ in range(20):  # it may be back before the other comes
                client.revoke(leases[-1])
                with contextlib.suppress(UsageError):
                    stack.enter_context(prepared.publishing(**OTHER))
                    break
            until("it is told", lambda: any("with another plan" in one.message for one in told))
            (refused,) = (one.message for one in told if "with another plan" in one.message)
            assert "is already served with another plan" in refused
            assert "replaced this plan while etcd had lost it" in refused


@pytest.mark.proof
def test_a_host_that_is_lost_whole_is_taken_out_by_the_others_and_one_that_runs_is_not(prepared: Prepared) -> None:
    told: list[Event] = []
    with prepared.publishing() as presence:
        presence.tell(told.append, lambda lease: None)
        lost, own = prepared.register("127.0.0.2"), prepared.register("127.0.0.1")
        with prepared.publishing("node2") as other:
            other.tell(told.append, lambda lease: None)
            third = prepared.register("127.0.0.3")
            until("what no share holds is out", lambda: prepared.registered() == {"127.0.0.1", "127.0.0.2"})
            until("and that is told", lambda: bool(told))
            assert [one.message.partition(" is gone")[0] for one in told] == ["a host (127.0.0.3)"]
        until("so is the second host", lambda: prepared.registered() == {"127.0.0.1"}, seconds=LOST_AFTER_S + 60)
        until("and that too", lambda: "node2 (127.0.0.2) is gone" in told[-1].message)
        with prepared.client() as client:
            assert client.lease(lost) is client.lease(third) is None
            assert client.revoke(own)


def test_of_two_plans_that_two_hosts_start_at_once_one_is_there_and_the_other_refused(prepared: Prepared) -> None:
    fork = multiprocessing.get_context("fork")
    both, results, rounds = fork.Barrier(2, timeout=60), fork.Queue(), 8
    published = prepared.published

    def start(host: str, configs: dict[str, Any]) -> None:
        for number in range(rounds):
            name = f"{name_of(prepared.plan)}-{number}"
            hosts = prepared.asked.hosts.model_copy(update={"name": name})
            own = replace(published, asked=replace(prepared.asked, hosts=hosts, **configs))
            both.wait()
            try:
                with publishing(replace(prepared.plan, namespace=f"trtx-{name}"), own, host):
                    results.put((number, host, "serves"))
                    both.wait()
            except UsageError as error:
                results.put((number, host, str(error)))
                both.wait()

    runs = [fork.Process(target=start, args=one) for one in (("node1", {}), ("node2", OTHER))]
    for run in runs:
        run.start()
    found = [results.get(timeout=60) for _ in range(2 * rounds)]
    for run in runs:
        run.join(60)
        assert run.exitcode == 0
    for number in range(rounds):
        first, second = sorted((told for at, _, told in found if at == number), key=len)
        assert first == "serves"
        assert "is already served with another plan; stop it, or give this one another name" in second


def test_a_start_that_is_refused_takes_its_plan_back(prepared: Prepared) -> None:
    with pytest.raises(RuntimeError), prepared.publishing():
        raise RuntimeError
    with pytest.raises(UsageError, match="no topology of that name"):
        find(prepared.plan)


def test_what_is_refused_on_this_host_is_refused_before_others_hear_of_it(prepared: Prepared, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        spec = TopologySpec(engine="paced", model=MODEL, port=taken.getsockname()[1])
        with pytest.raises(UsageError, match="is in use.*start trtx serve --hosts with another --port$"):
            serve_hosts(spec, prepared.asked.hosts, this_host=None, run_dir=tmp_path / "again", dry_run=False)
    with pytest.raises(UsageError, match="no topology of that name"):
        find(prepared.plan)


def test_other_files_and_other_versions_are_refused_where_it_is_joined(prepared: Prepared) -> None:
    own = Published.of(prepared.asked, prepared.plan.model_path)
    with pytest.raises(UsageError, match="differ from those that the topology was planned with"):
        own.check_here("synthetic:tiny")
    with pytest.raises(UsageError, match=r"ai-dynamo is .* here and 9\.9 where the topology was planned"):
        replace(own, versions={**own.versions, "ai-dynamo": "9.9"}).check_here(None)


def test_what_another_trtx_published_is_refused_and_not_guessed(plan: Plan) -> None:
    assert plan.etcd is not None
    with open_etcd(plan.etcd) as client:
        for content in (b"{}", b"not JSON", json.dumps({"schema_version": 99}).encode()):
            client.put(f"trtx/topologies/{name_of(plan)}/plan", content)
            with pytest.raises(UsageError, match="can't be read by this trtx"):
                find(plan)
        client.delete(f"trtx/topologies/{name_of(plan)}/plan")
