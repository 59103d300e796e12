"""Exports against the operator's schema and the client's models, and both seen to refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from exported_manifests import ASKED, Manifest, exported, manifests, pods
from kubernetes_models import problems, problems_of_pod

pytestmark = pytest.mark.slow
SCHEMA = json.loads((Path(__file__).parent / "dgd_v1beta1.json").read_text(encoding="utf-8"))
OPERATOR = [name for name in ASKED if name.startswith("operator")]


def graph(name: str) -> Manifest:
    [found] = [one for one in manifests(name) if one["kind"] == "DynamoGraphDeployment"]
    return found


def graph_problems(document: Manifest) -> list[str]:
    """Schema, CEL rules, what the admission webhook asks on create, and the pod templates."""
    found = [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(document)]
    components = document["spec"].get("components", ())
    names = [component["name"].lower() for component in components]
    found += [] if components else ["must have at least one component"]
    found += ["spec.restart must be unset on create"] if "restart" in document["spec"] else []
    found += ["component names must be unique case-insensitively"] if len({*names}) < len(names) else []
    found += ["at most one component may have type epp"] if [c.get("type") for c in components].count("epp") > 1 else []
    found += problems_of_pod({"spec": {"containers": [{"name": "env", "env": document["spec"].get("env", [])}]}})
    for component in components:
        if component.get("replicas", 1) and component.get("minAvailable", 1) > component.get("replicas", 1):
            found.append("minAvailable must be less than or equal to replicas unless replicas is 0")
        [main] = [c for c in component["podTemplate"]["spec"]["containers"] if c["name"] == "main"] or [{}]
        found += [] if main.get("image") else [f"{component['name']} must have a container main with an image"]
        tag = re.search(r":v?\d+\.\d+\.\d+$", main.get("image", ""))
        if tag is None and "runtimeVersionOverride" not in component:
            found.append("runtimeVersionOverride is required where the tag is not a version")
        if "multinode" in component:
            if component.get("type") not in ("worker", "prefill", "decode"):
                found.append("multinode is supported only for worker, prefill, or decode components")
            if not main.get("resources", {}).get("limits", {}).get("nvidia.com/gpu"):
                found.append("an engine over nodes has as many ranks as its pods have GPUs")
        found += problems_of_pod(component["podTemplate"])
        found += [] if combined_length(document, component) <= 45 else ["combined resource name length exceeds 45"]
    return found


def combined_length(document: Manifest, component: Manifest) -> int:
    """``dgdComponentResourceNameLength`` of the operator, before it cut names by itself: PodCliqueSet and PodClique; of
    an engine over nodes the scaling group and its leader."""
    name = component["name"].lower()
    parts = [document["metadata"]["name"], name]
    if component.get("multinode", {}).get("nodeCount", 1) > 1:
        parts.append(f"{name}-ldr")
    return sum(map(len, parts))


@pytest.mark.parametrize("name", OPERATOR)
def test_a_graph_is_one_that_the_operator_takes(name: str) -> None:
    assert graph_problems(graph(name)) == []


@pytest.mark.parametrize("name", list(ASKED))
def test_manifests_are_what_the_clients_models_take(name: str) -> None:
    for manifest in manifests(name):
        if manifest["kind"] != "DynamoGraphDeployment":
            assert problems(manifest) == []


@pytest.mark.parametrize("name", list(ASKED))
def test_volumes_claims_and_accounts_that_are_named_are_there(name: str) -> None:
    there = {(one["kind"], one["metadata"]["name"]) for one in manifests(name)}
    for pod in pods(name):
        spec = pod["spec"]
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes.keys()
        for volume in volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in there
        if "serviceAccountName" in spec:
            assert ("ServiceAccount", spec["serviceAccountName"]) in there


@pytest.mark.parametrize("name", list(ASKED))
def test_deployments_and_services_select_the_pods_that_are_meant(name: str) -> None:
    labels = {
        one["metadata"]["name"]: one["spec"]["template"] for one in manifests(name) if one["kind"] == "Deployment"
    }
    for manifest in manifests(name):
        if manifest["kind"] == "Deployment":
            own = manifest["spec"]["template"]["metadata"]["labels"]
            assert manifest["spec"]["selector"]["matchLabels"].items() <= own.items()
        elif manifest["kind"] == "Service":
            selector = manifest["spec"]["selector"].items()
            chosen = {name for name, pod in labels.items() if selector <= pod["metadata"]["labels"].items()}
            workers = labels.keys() - {"shown-frontend"}
            several = "2" in str(ASKED[name][1].get("frontends"))
            wanted = {"shown-frontend"} if manifest["metadata"]["name"] == "shown-frontend" else workers
            assert chosen == wanted | ({"shown-frontend"} if several else set())


@pytest.mark.parametrize("name", list(ASKED))
def test_files_say_how_they_are_used_and_hold_no_template(name: str) -> None:
    files = exported(name).files
    assert "kubectl apply -f" in "".join(file.text for file in files)
    for file in files:
        assert file.text.startswith("# ")
        assert not re.search(r"\{\{|<[a-z-]+>|TODO", file.text)
        assert all(len(line) <= 120 for line in file.text.splitlines() if line.startswith("#"))
