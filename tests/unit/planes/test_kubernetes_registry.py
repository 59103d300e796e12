"""What the registry reads of the objects that Dynamo 1.4.2 applies, and what it deletes, over an API server's HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from loopback import Handler, serving

from trtx.planes.kubernetes_registry import KubernetesRegistry
from trtx.planes.registry import Card, Instance, RegistryUnknown

pytestmark = pytest.mark.slow

_METADATA = "/apis/nvidia.com/v1alpha1/namespaces/serving/dynamoworkermetadatas"
_SLICES = "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"


def metadata(pod: str, worker_id: int, *, namespace: str = "serving-shown", has_card: bool = True) -> dict[str, Any]:
    """As a worker of Dynamo 1.4.2 applies it, cut to what is read of it."""
    key = f"{namespace}/backend/generate/{worker_id:x}"
    common = {"component": "backend", "endpoint": "generate", "namespace": namespace, "instance_id": worker_id}
    tcp = f"10.1.2.{worker_id}:32809/{worker_id:x}/generate"
    card = {"display_name": "tiny", "runtime_config": {"runtime_data": {"trtx": {"name": pod}}}}
    data = {
        "endpoints": {
            key: {"type": "Endpoint", **common, "transport": {"tcp": tcp}},
            "clear": {"type": "Endpoint", **common, "endpoint": "clear", "transport": {"tcp": tcp}},
        },
        "model_cards": {key: {"type": "Model", **common, "card_json": card}} if has_card else {},
        "event_channels": {},
    }
    return {"metadata": {"name": pod}, "spec": {"data": data}}


def pods(**ready: bool | None) -> dict[str, Any]:
    endpoints = [{"conditions": {"ready": is_ready}, "targetRef": {"name": pod}} for pod, is_ready in ready.items()]
    return {"endpoints": endpoints}


class Api:
    """Lists what it was given, and deletes."""

    def __init__(self) -> None:
        self.objects: dict[str, list[dict[str, Any]]] = {_METADATA: [], _SLICES: []}
        self.labels: set[str] = set()
        self.status = 200
        outer = self

        class Objects(Handler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                outer.labels.update(parse_qs(parts.query).get("labelSelector", ()))
                self.answer(outer.status, {"items": outer.objects[parts.path]})

            def do_DELETE(self) -> None:
                path, _, name = urlsplit(self.path).path.rpartition("/")
                left = [one for one in outer.objects[path] if one["metadata"]["name"] != name]
                was_there = len(left) < len(outer.objects[path])
                outer.objects[path] = left
                self.answer(200 if was_there else 404, {})

        self._stack = ExitStack()
        self.url = self._stack.enter_context(serving(Objects))

    def close(self) -> None:
        """No call is answered any more."""
        self._stack.close()


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    api = Api()
    (tmp_path / "kubeconfig").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
                "clusters": [{"name": "here", "cluster": {"server": api.url}}],
                "users": [{"name": "me", "user": {"token": "me"}}],
            }
        )
    )
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield api
    api.close()


def test_workers_are_those_of_ready_pods_with_a_card_in_its_own_namespace(api: Api) -> None:
    api.objects[_METADATA] = [
        metadata("ready", 1),
        metadata("unknown", 2),
        metadata("starting", 3),
        metadata("loading", 4, has_card=False),
        metadata("another", 5, namespace="serving-other"),
        {"metadata": {"name": "odd"}, "spec": {"data": {"endpoints": {"a": {"namespace": "serving-shown"}}}}},
        {"metadata": {"name": "empty"}},
    ]
    api.objects[_SLICES] = [pods(ready=True, unknown=None), pods(starting=False, loading=True, another=True)]
    registry = KubernetesRegistry("serving", "serving-shown")
    assert registry.worker_ids() == {1, 2}
    assert api.labels == {"nvidia.com/dynamo-discovery-enabled=true"}
    assert registry.instances() == [Instance(number, 32809, f"10.1.2.{number}", "backend") for number in (1, 2, 3, 4)]
    assert registry.cards()[0] == Card(1, "tiny", {"trtx": {"name": "ready"}})
    assert [card.worker_id for card in registry.cards()] == [1, 2, 3]
    assert registry.renewed_at(1) is None
    registry.close()


def test_a_rolling_update_has_workers_of_namespaces_that_begin_alike(api: Api) -> None:
    api.objects[_METADATA] = [metadata("old", 1), metadata("new", 2, namespace="serving-shown-1a2b")]
    assert [one.worker_id for one in KubernetesRegistry("serving", "serving-shown", is_prefix=True).instances()] == [
        1,
        2,
    ]


def test_a_worker_that_is_removed_takes_the_object_of_its_pod_along_and_no_other(api: Api) -> None:
    api.objects[_METADATA] = [metadata("dead", 1), metadata("living", 2)]
    registry = KubernetesRegistry("serving", "serving-shown")
    registry.remove(1)
    registry.remove(1)
    assert [one["metadata"]["name"] for one in api.objects[_METADATA]] == ["living"]


def test_what_the_api_server_refuses_or_does_not_answer_is_not_known(api: Api) -> None:
    registry = KubernetesRegistry("serving", "serving-shown")
    api.status = 403
    with pytest.raises(RegistryUnknown, match="Kubernetes' API server can't be queried .403 Forbidden"):
        registry.instances()
    api.status = 200
    assert registry.instances() == []
    api.close()
    with pytest.raises(RegistryUnknown, match="Kubernetes' API server can't be queried"):
        KubernetesRegistry("serving", "serving-shown", timeout_s=0.5).worker_ids()


def test_without_a_cluster_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(RegistryUnknown, match="Kubernetes' API server can't be queried"):
        KubernetesRegistry("serving", "serving-shown").cards()
