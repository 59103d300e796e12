"""Exports that between them have everything that an export may have, and their fields."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import yaml

from trtx.config import TopologySpec
from trtx.export.kubernetes import KubernetesTarget, export
from trtx.export.outcome import Export

Manifest = dict[str, Any]

_IMAGE = "registry.example/trtx:1.4.2"
_RICH: dict[str, Any] = {
    "image_pull_secret": "registry",
    "tls_secret": "front-door",
    "memory": "64Gi",
    "node_selector": ("pool=gpu",),
    "resources": ("rdma/ib=1",),
    "bench": ("--concurrency", "1,8"),
}
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # name -> topology, target
    "operator agg": ({"model": "synthetic:qwen3-0.6b", "engine": "tensorrt-llm", "workers": 2}, {}),
    "operator disagg": (
        {"model": "synthetic:qwen3-0.6b", "engine": "tensorrt-llm", "mode": "disagg", "tp": 2, "router_mode": "kv"},
        {"model_claim": "models/qwen3", **_RICH},
    ),
    "operator over nodes": (
        {"model": "synthetic:qwen3-0.6b", "engine": "tensorrt-llm", "mode": "disagg", "tp": 16},
        {"image": "registry.example/trtx:latest", "bench": ()},
    ),
    "plain agg": ({"model": "synthetic:tiny-trained", "engine": "torch"}, {"gpus_per_node": 0}),
    "plain disagg": (
        {
            "model": "synthetic:tiny-trained",
            "engine": "torch",
            "mode": "disagg",
            "router_mode": "kv",
            "otlp_endpoint": "http://collector.telemetry:4318",
        },
        {"nats": "nats://nats.events:4222", "frontends": 2, **_RICH},
    ),
    "plain paced": (
        {"model": "synthetic:tiny-trained", "engine": "paced", "log_format": "json"},
        {"model_claim": "models"},
    ),
}


@functools.cache
def exported(name: str) -> Export:
    topology, target = ASKED[name]
    form = name.partition(" ")[0]
    return export(
        TopologySpec(**topology), KubernetesTarget(**{"form": form, "name": "shown", "image": _IMAGE, **target})
    )


def manifests(name: str) -> list[Manifest]:
    return [one for file in exported(name).files for one in yaml.safe_load_all(file.text)]


def pods(name: str) -> list[Manifest]:
    """Every pod template of an export, those of its Job included."""
    templates = []
    for manifest in manifests(name):
        if manifest["kind"] in ("Deployment", "Job"):
            templates.append(manifest["spec"]["template"])
        elif manifest["kind"] == "DynamoGraphDeployment":
            templates += [component["podTemplate"] for component in manifest["spec"]["components"]]
    return templates


_MAPS = ("labels", "matchLabels", "selector", "nodeSelector", "limits", "requests", "data", "env")
_TEMPLATES = ("Deployment.spec.template", "Job.spec.template", "DynamoGraphDeployment.spec.components[].podTemplate")
_COPIED = "CustomResourceDefinition.spec"


def fields(manifest: Manifest) -> set[str]:
    """Of each value that stands in it: ``Deployment.spec.replicas``, ``Pod.spec.containers[].image``. Maps whose keys
    are no fields of Kubernetes are one; so is what is copied whole."""
    found = set()
    for path in _leaves(manifest, manifest["kind"]):
        for template in _TEMPLATES:
            path = f"Pod{path.removeprefix(template)}" if path.startswith(f"{template}.") else path
        found.add(path)
    return found - {f"{manifest['kind']}.apiVersion", f"{manifest['kind']}.kind"}


def _leaves(value: Any, path: str) -> Iterator[str]:
    if path.rpartition(".")[2] in _MAPS or path == _COPIED:
        yield path
    elif isinstance(value, dict) and value:
        for key, entry in value.items():
            yield from _leaves(entry, f"{path}.{key}")
    elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        for entry in value:
            yield from _leaves(entry, f"{path}[]")
    else:
        yield path


def variables(name: str) -> set[str]:
    """Of the main containers' environment."""
    containers = [pod["spec"]["containers"][0] for pod in pods(name)]
    return {entry["name"] for one in containers if one["name"] == "main" for entry in one["env"]}
