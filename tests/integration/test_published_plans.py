"""A plan over hosts in a real etcd: who finds it, what has to be the same where it is joined, and when it goes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from services import etcd

from trtx.checkpoint import resolve_checkpoint
from trtx.cli.serving import serve_hosts
from trtx.config import TopologySpec
from trtx.config.hosts import HostsSpec
from trtx.errors import UsageError
from trtx.launch import find_published, name_of, prepare_hosts, publishing, withdrawn_at_the_end
from trtx.launch.discovery import open_etcd
from trtx.launch.host_preparation import plan_again
from trtx.launch.published import Asked, Published
from trtx.topology import Plan

MODEL = "synthetic:tiny-trained"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with etcd(tmp_path_factory.mktemp("etcd")) as service:
        yield service.url


@dataclass(frozen=True)
class Prepared:
    plan: Plan
    asked: Asked

    def publishing(self) -> AbstractContextManager[None]:
        return publishing(self.plan, self.asked)


@pytest.fixture
def prepared(url: str, request: pytest.FixtureRequest, tmp_path: Path) -> Prepared:
    name = f"t{abs(hash(request.node.name)) % 10**8}"
    hosts = HostsSpec.model_validate(
        {
            "name": name,
            "etcd": [url],
            "nats": "nats://127.0.0.1:4222",
            "hosts": [{"name": "node1", "address": "127.0.0.1", "device": "lo"}],
        }
    )
    spec = TopologySpec(engine="paced", model=MODEL)
    planned, asked = prepare_hosts(spec, hosts, run_dir=tmp_path / "run")
    assert asked.model == MODEL and name_of(planned) == name
    return Prepared(planned, asked)


@pytest.fixture
def plan(prepared: Prepared) -> Plan:
    return prepared.plan


def register(plan: Plan) -> None:
    """A worker of its topology, as Dynamo 1.4.2 writes one."""
    record = {"endpoint": "generate", "component": "backend", "instance_id": 0xAB}
    record |= {"transport": {"tcp": "127.0.0.1:17002/ab/generate"}}
    assert plan.etcd is not None
    with open_etcd(plan.etcd) as client:
        client.put(f"v1/instances/{plan.namespace}/backend/generate/ab", json.dumps(record).encode())


def leave(plan: Plan) -> None:
    assert plan.etcd is not None
    with open_etcd(plan.etcd) as client:
        client.delete(f"v1/instances/{plan.namespace}/", is_prefix=True)


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
        assert (again.etcd, again.nats, again.hosts, again.model) == (plan.etcd, plan.nats, plan.hosts, plan.model)
    with pytest.raises(UsageError, match="no topology of that name is planned in etcd"):
        find(plan)


def test_it_stays_for_the_shares_that_go_on_and_goes_with_the_last_of_them(prepared: Prepared) -> None:
    plan = prepared.plan
    with withdrawn_at_the_end(plan):  # one that joined
        with prepared.publishing():
            register(plan)
        assert find(plan).asked == prepared.asked
        leave(plan)
    with pytest.raises(UsageError, match="no topology of that name"):
        find(plan)


def test_a_share_that_is_started_again_serves_what_is_served_already(prepared: Prepared) -> None:
    with prepared.publishing():
        register(prepared.plan)
        with publishing(replace(prepared.plan, run_dir=Path("/another")), prepared.asked):
            assert find(prepared.plan).asked == prepared.asked
        leave(prepared.plan)


def test_another_plan_of_that_name_is_refused_while_one_is_served(prepared: Prepared) -> None:
    plan = prepared.plan
    other = replace(prepared.asked, engine_configs={"agg": {"max_batch_size": 7}})
    with prepared.publishing():
        register(plan)
        with pytest.raises(UsageError, match="is served already, by another plan"), publishing(plan, other):
            pass
        assert find(plan).asked == prepared.asked
        leave(plan)
    with publishing(plan, other):  # nobody serves it any more: what was left would be old
        assert find(plan).asked == other


def test_where_the_plan_of_what_is_served_was_lost_no_other_takes_its_place(prepared: Prepared) -> None:
    register(prepared.plan)
    try:
        with pytest.raises(UsageError, match="its plan is not there any more"), prepared.publishing():
            pass
        with pytest.raises(UsageError, match="no topology of that name"):
            find(prepared.plan)
    finally:
        leave(prepared.plan)


def test_what_this_host_itself_left_behind_keeps_nobody_from_starting(prepared: Prepared) -> None:
    register(prepared.plan)
    try:
        with publishing(prepared.plan, prepared.asked, this_host="node1"):
            assert find(prepared.plan).asked == prepared.asked
    finally:
        leave(prepared.plan)
    with withdrawn_at_the_end(prepared.plan):
        pass


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
    with pytest.raises(UsageError, match="are others than those that the topology was planned with"):
        own.check_here("synthetic:tiny")
    with pytest.raises(UsageError, match=r"ai-dynamo is .* here and 9\.9 where the topology was planned"):
        replace(own, versions={**own.versions, "ai-dynamo": "9.9"}).check_here(None)


def test_what_another_trtx_published_is_refused_and_not_guessed(plan: Plan) -> None:
    assert plan.etcd is not None
    with open_etcd(plan.etcd) as client:
        for content in (b"{}", b"not JSON", json.dumps({"schema_version": 99}).encode()):
            client.put(f"trtx/topologies/{name_of(plan)}/plan", content)
            with pytest.raises(UsageError, match="is none that this trtx reads"):
                find(plan)
