"""Frontend and workers over a real etcd and a real NATS on loopback: what trtx sees of them there, and takes out."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import HTTP, Topology, topology, until
from services import EtcdService, Service, etcd, nats

from trtx.checkpoint import resolve_checkpoint
from trtx.engine import worker_facts
from trtx.launch.discovery import owner
from trtx.planes.etcd import Etcd
from trtx.planes.etcd_registry import EtcdRegistry, namespaces
from trtx.planes.watched import WatchedRegistry

_NAMESPACE = "trtx-planes"
_TTL_S = 120  # longer than any wait of these tests: what is gone before was taken out


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EtcdService, Service]]:
    directory = tmp_path_factory.mktemp("services")
    with etcd(directory / "etcd") as first, nats(directory / "nats") as second:
        yield first, second


def environment(services: tuple[EtcdService, Service]) -> dict[str, str]:
    return {
        "DYN_NAMESPACE": _NAMESPACE,
        "DYN_DISCOVERY_BACKEND": "etcd",
        "ETCD_ENDPOINTS": services[0].url,
        "ETCD_LEASE_TTL": str(_TTL_S),
        "DYN_EVENT_PLANE": "nats",
        "NATS_SERVER": f"nats://127.0.0.1:{services[1].port}",
    }


def test_a_dead_worker_leaves_the_routing_long_before_its_lease_and_what_lives_is_told(
    services: tuple[EtcdService, Service], tmp_path: Path
) -> None:
    model = resolve_checkpoint("synthetic:tiny").path
    with topology(tmp_path, model) as running, Etcd([services[0].url]) as client:
        registry = EtcdRegistry(client, _NAMESPACE, lease_ttl_s=_TTL_S)
        assert registry.instances() == []
        assert registry.worker_ids() == set()
        running.extra_environment = environment(services)
        running.start_frontend("--migration-limit", "3")
        first, second = running.start_worker("agg-0"), running.start_worker("agg-1")
        running.wait_ready(aggregated=2)

        ids = {child.name: child.status()["worker_id"] for child in (first, second)}
        assert registry.worker_ids() == set(ids.values())
        assert {instance.host for instance in registry.instances()} == {"127.0.0.1"}
        assert owner(registry, first.process.pid, set()) == ids["agg-0"]
        assert owner(registry, first.process.pid, {ids["agg-0"]}) is None
        assert namespaces(client) == {_NAMESPACE}
        renewed = registry.renewed_at(ids["agg-0"])
        assert renewed is not None
        assert registry.records_live_s == _TTL_S
        assert _published(running) == {"agg-0", "agg-1"}

        watched = WatchedRegistry(EtcdRegistry(Etcd([services[0].url]), _NAMESPACE, lease_ttl_s=_TTL_S))
        try:
            assert until("the thread has looked", lambda: _known(watched)) == set(ids.values())
            os.kill(second.process.pid, signal.SIGKILL)
            second.process.wait()
            running.children.remove(second)
            watched.remove(ids["agg-1"])
            assert watched.worker_ids() == {ids["agg-0"]}  # to whoever asked, at once
            running.wait_ready(aggregated=1)
            until("its records are gone", lambda: registry.worker_ids() == {ids["agg-0"]})
            assert client.lease(ids["agg-1"]) is None
        finally:
            watched.close()
        assert _published(running) == {"agg-0"}


def _known(registry: WatchedRegistry) -> set[int] | None:
    try:
        return registry.worker_ids()
    except OSError:
        return None


def _published(running: Topology) -> set[str]:
    found = worker_facts.of_body(HTTP.get(f"{running.url}{worker_facts.PATH}", timeout=10).content)
    assert found is not None
    return {worker.facts.name for worker in found}
