"""A plan over hosts in a real etcd: who finds it, what has to be the same where it is joined, and when it goes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from services import etcd

from trtx.checkpoint import resolve_checkpoint
from trtx.config import TopologySpec
from trtx.config.hosts import HostsSpec
from trtx.errors import UsageError
from trtx.launch import find_published, name_of, prepare_hosts, publishing, withdrawn_at_the_end
from trtx.launch.discovery import open_etcd
from trtx.topology import Plan

MODEL = "synthetic:tiny-trained"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with etcd(tmp_path_factory.mktemp("etcd")) as service:
        yield service.url


@pytest.fixture
def plan(url: str, request: pytest.FixtureRequest, tmp_path: Path) -> Plan:
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
    planned, model = prepare_hosts(spec, hosts, run_dir=tmp_path / "run")
    assert model == MODEL and name_of(planned) == name
    return planned


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


def test_a_published_plan_is_found_whole_while_it_is_served_and_goes_with_its_end(plan: Plan) -> None:
    with publishing(plan, MODEL) as own:
        assert find(plan) == own and own.plan == plan
        assert own.check_here(None) == resolve_checkpoint(MODEL).path
    with pytest.raises(UsageError, match="no topology of that name is planned in etcd"):
        find(plan)


def test_it_stays_for_the_shares_that_go_on_and_goes_with_the_last_of_them(plan: Plan) -> None:
    with withdrawn_at_the_end(plan):  # one that joined
        with publishing(plan, MODEL):
            register(plan)
        assert find(plan).plan == plan
        leave(plan)
    with pytest.raises(UsageError, match="no topology of that name"):
        find(plan)


def test_a_share_that_is_started_again_serves_what_is_served_already(plan: Plan) -> None:
    with publishing(plan, MODEL):
        register(plan)
        elsewhere = replace(plan, run_dir=Path("/another"))
        with publishing(elsewhere, MODEL) as found:
            assert found.plan == plan  # the other hosts' one, not its own
        leave(plan)


def test_another_plan_of_that_name_is_refused_while_one_is_served(plan: Plan) -> None:
    other = replace(plan, engine_configs={"agg": {"max_batch_size": 7}})
    with publishing(plan, MODEL):
        register(plan)
        with pytest.raises(UsageError, match="is served already, by another plan"), publishing(other, MODEL):
            pass
        assert find(plan).plan == plan
        leave(plan)
    with publishing(other, MODEL):  # nobody serves it any more: what was left would be old
        assert find(plan).plan == other


def test_other_files_and_other_versions_are_refused_where_it_is_joined(plan: Plan) -> None:
    with publishing(plan, MODEL) as own:
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
