"""Builds the ``DynamoGraphDeployment`` (``nvidia.com/v1beta1``), from which Dynamo's operator creates the pods.

Sources: ai-dynamo/dynamo ``deploy/operator/api/v1beta1`` and ``internal/dynamo``, at the commits in
``tests/unit/export/dgd_v1beta1.json``. The operator itself provides discovery, Services, accounts and roles, the
workers' probes and Dynamo's namespace.
"""

from __future__ import annotations

import re
from importlib.metadata import version

from trtx.export.kubernetes.planning import PodKind, PodPlan
from trtx.export.kubernetes.pods import Manifest, pod_template

API_VERSION = "nvidia.com/v1beta1"
_TYPES = {"frontend": "frontend", "agg": "worker", "prefill": "prefill", "decode": "decode"}
_FRAMEWORK = "trtllm"


def graph(planned: PodPlan, config_map: str) -> Manifest:
    """Returns the graph. The required ``backendFramework`` determines how engines over several nodes are started."""
    target = planned.target
    return {
        "apiVersion": API_VERSION,
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": target.name, "namespace": target.namespace},
        "spec": {
            "backendFramework": _FRAMEWORK,
            "components": [_component(planned, kind, config_map) for kind in planned.kinds],
        },
    }


def _component(planned: PodPlan, kind: PodKind, config_map: str) -> Manifest:
    component: Manifest = {"name": kind.role, "type": _TYPES[kind.role], "replicas": kind.replicas}
    if (runtime := version("ai-dynamo")) != _tag_version(planned.target.image):
        component["runtimeVersionOverride"] = runtime
    if kind.pods > 1:
        component["multinode"] = {"nodeCount": kind.pods}
    if kind.is_worker:
        component["sharedMemorySize"] = planned.target.shared_memory
    component["podTemplate"] = pod_template(planned, kind, config_map)
    return component


def _tag_version(image: str) -> str | None:
    """Returns the version that the operator would parse from an image's tag, or None."""
    found = re.search(r":v?(\d+\.\d+\.\d+)$", image)
    return found[1] if found else None
