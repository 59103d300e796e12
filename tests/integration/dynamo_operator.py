"""A ``DynamoGraphDeployment`` as Dynamo's operator makes Deployments of it, as far as its containers see it.

After ai-dynamo/dynamo, ``deploy/operator/internal/dynamo``: ``component_common.go`` and ``component_worker.go`` at
015d780, ``component_frontend.go`` at 132ccbe. A template's own values win over the operator's.
"""

from __future__ import annotations

from typing import Any

Manifest = dict[str, Any]

WORKER_SUFFIX = "1a2b3c4d"
"""Of Dynamo's namespace of workers, as the operator keeps those before and after an update apart."""
_LIVE = {
    "httpGet": {"path": "/live", "port": 9090, "scheme": "HTTP"},
    "periodSeconds": 5,
    "timeoutSeconds": 4,
    "failureThreshold": 1,
}
_READY = {
    "httpGet": {"path": "/health", "port": 9090, "scheme": "HTTP"},
    "periodSeconds": 10,
    "timeoutSeconds": 4,
    "failureThreshold": 3,
}
_DISCOVERED = {"dynamo-discovered": "true"}
_VERBS = ["get", "list", "watch", "create", "patch"]


def made_by_the_operator(graph: Manifest) -> list[Manifest]:
    """Deployments, the Service of discovery, and the account of all."""
    metadata = graph["metadata"]
    made = [_deployment(graph, component) for component in graph["spec"]["components"]]
    account = {"name": metadata["name"], "namespace": metadata["namespace"]}
    resources = ["endpointslices", "dynamoworkermetadatas"]
    return [
        *made,
        {"kind": "Role", "metadata": account, "rules": [{"resources": resources, "verbs": _VERBS}]},
        {"kind": "RoleBinding", "metadata": account, "roleRef": {"name": metadata["name"]}, "subjects": [account]},
        {
            "kind": "Service",
            "metadata": {**account, "labels": {"nvidia.com/dynamo-discovery-enabled": "true"}},
            "spec": {"selector": _DISCOVERED, "ports": [{"name": "system", "port": 9090}]},
        },
    ]


def _deployment(graph: Manifest, component: Manifest) -> Manifest:
    metadata = graph["metadata"]
    template = component["podTemplate"]
    [main] = [one for one in template["spec"]["containers"] if one["name"] == "main"]
    is_worker = component["type"] != "frontend"
    added = _environment(f"{metadata['namespace']}-{metadata['name']}", is_worker=is_worker)
    own = {one["name"] for one in main["env"]}
    probes = {"livenessProbe": _LIVE, "readinessProbe": _READY} if is_worker else {}
    container = {**probes, **main, "env": [*(one for one in added if one["name"] not in own), *main["env"]]}
    spec = {**template["spec"], "containers": [container], "serviceAccountName": metadata["name"]}
    labels = {**template["metadata"]["labels"], **(_DISCOVERED if is_worker else {})}
    return {
        "kind": "Deployment",
        "metadata": {"name": f"{metadata['name']}-{component['name']}", "namespace": metadata["namespace"]},
        "spec": {"replicas": component["replicas"], "template": {"metadata": {"labels": labels}, "spec": spec}},
    }


def _environment(namespace: str, *, is_worker: bool) -> list[Manifest]:
    fields = {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "POD_UID": "metadata.uid"}
    values = {"DYN_NAMESPACE": namespace, "DYN_DISCOVERY_BACKEND": "kubernetes"}
    if is_worker:
        values |= {
            "DYN_SYSTEM_ENABLED": "true",
            "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]',
            "DYN_SYSTEM_PORT": "9090",
            "DYN_HEALTH_CHECK_ENABLED": "false",
            "NIXL_TELEMETRY_ENABLE": "n",
            "DYN_NAMESPACE_WORKER_SUFFIX": WORKER_SUFFIX,
        }
    else:
        values |= {"DYN_HTTP_PORT": "8000", "DYN_NAMESPACE_PREFIX": namespace}
    return [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        *({"name": name, "value": value} for name, value in values.items()),
    ]
