"""The form without Dynamo's operator: Deployments, Services, accounts with minimal roles, and the CRD for discovery."""

from __future__ import annotations

from trtx.export.kubernetes.planning import PodKind, PodPlan
from trtx.export.kubernetes.pods import TOPOLOGY_LABEL, Manifest, labels, pod_template
from trtx.export.kubernetes.variables import HTTP_PORT, SYSTEM_PORT

DISCOVERY_LABEL = "nvidia.com/dynamo-discovery-enabled"
"""Frontends (seen with Dynamo 1.4.2) watch EndpointSlices with this label, which each has from its Service."""
DISCOVERED_LABEL = "trtx-discovered"
"""The label of pods that other pods must discover: workers, and KV routers, which tell each other where they sent
requests."""
METADATA_GROUP, METADATA_PLURAL = "nvidia.com", "dynamoworkermetadatas"


def metadata_crd() -> Manifest:
    """Returns the CRD in which each worker of Dynamo (seen with 1.4.2) publishes its metadata for the frontends.

    It equals that of ai-dynamo/dynamo@2a8e78c, ``deploy/helm/charts/platform/components/operator/crds``. The operator's
    charts install it themselves.
    """
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{METADATA_PLURAL}.{METADATA_GROUP}"},
        "spec": {
            "group": METADATA_GROUP,
            "names": {
                "kind": "DynamoWorkerMetadata",
                "listKind": "DynamoWorkerMetadataList",
                "plural": METADATA_PLURAL,
                "singular": "dynamoworkermetadata",
                "shortNames": ["dwm"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": "v1alpha1",
                    "served": True,
                    "storage": True,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "properties": {
                                "spec": {
                                    "type": "object",
                                    "required": ["data"],
                                    "properties": {
                                        "data": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                                    },
                                }
                            },
                        }
                    },
                }
            ],
        },
    }


def access(planned: PodPlan) -> list[Manifest]:
    """Returns account, role and binding for frontends and for workers, with the API requests observed in Dynamo 1.4.2.

    A KV router writes its own object. If that is forbidden, its frontend serves no model and logs no error.
    """
    reads, writes = ("list", "watch"), ("list", "watch", "create", "patch")
    manifests = []
    for part, verbs in (("frontend", writes if planned.routes_by_prefix else reads), ("worker", writes)):
        role = {
            **_head(planned, "rbac.authorization.k8s.io/v1", "Role", part),
            "rules": [
                {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
                {"apiGroups": [METADATA_GROUP], "resources": [METADATA_PLURAL], "verbs": list(verbs)},
            ],
        }
        account = _head(planned, "v1", "ServiceAccount", part)
        name, namespace = account["metadata"]["name"], planned.target.namespace
        binding = {
            **_head(planned, "rbac.authorization.k8s.io/v1", "RoleBinding", part),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        }
        manifests += [account, role, binding]
    return manifests


def deployment(planned: PodPlan, kind: PodKind, config_map: str) -> Manifest:
    """Returns the Deployment of a kind of pods.

    In a rolling update, a worker releases its GPUs before its replacement requests them; a new frontend starts before
    an old one stops.
    """
    template = pod_template(planned, kind, config_map)
    if kind.is_worker or (planned.routes_by_prefix and kind.replicas > 1):
        template["metadata"]["labels"] |= {DISCOVERED_LABEL: "true"}
    limits = {"maxSurge": 0, "maxUnavailable": 1} if kind.is_worker else {"maxSurge": 1, "maxUnavailable": 0}
    return {
        **_head(planned, "apps/v1", "Deployment", kind.role),
        "spec": {
            "replicas": kind.replicas,
            "selector": {"matchLabels": labels(planned, kind.role)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": limits},
            "template": template,
        },
    }


def http_service(planned: PodPlan) -> Manifest:
    """Returns the Service for clients, with the name that the operator would give it."""
    return {
        **_head(planned, "v1", "Service", "frontend"),
        "spec": {
            "selector": labels(planned, "frontend"),
            "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": HTTP_PORT}],
        },
    }


def discovery_service(planned: PodPlan) -> Manifest:
    """Returns the Service for which Kubernetes writes the EndpointSlices that frontends watch; no client connects."""
    head = _head(planned, "v1", "Service", "discovery")
    head["metadata"]["labels"] |= {DISCOVERY_LABEL: "true"}
    return {
        **head,
        "spec": {
            "clusterIP": "None",
            "selector": {TOPOLOGY_LABEL: planned.target.name, DISCOVERED_LABEL: "true"},
            "ports": [{"name": "system", "port": SYSTEM_PORT, "targetPort": SYSTEM_PORT}],
        },
    }


def _head(planned: PodPlan, api_version: str, kind: str, part: str = "") -> Manifest:
    target = planned.target
    name = f"{target.name}-{part}" if part else target.name
    metadata = {"name": name, "namespace": target.namespace, "labels": {TOPOLOGY_LABEL: target.name}}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}
