"""The manifests besides the pods in both forms: engine configs, network policies, the benchmark Job."""

from __future__ import annotations

import hashlib

import yaml

from trtx.export.kubernetes.planning import TLS_DIRECTORY, PodPlan
from trtx.export.kubernetes.pods import ROLE_LABEL, TOPOLOGY_LABEL, Manifest, tls_mount, tls_volume
from trtx.export.kubernetes.variables import HTTP_PORT
from trtx.topology import CHAT_TEMPLATE

RUNS = "/runs"
"""The mount point of the Job's volume, where ``trtx bench`` writes its run directory."""
_RUNS_SIZE = "2Gi"
_WAIT_S = 7200  # the time limit of the workers' startup probe
_CA = "ca.crt"


def engine_configs(planned: PodPlan) -> Manifest:
    """Returns a ConfigMap with one engine config per role, and the chat template if it replaces the model's.

    Its name contains a hash of the content, so a changed config replaces the pods.
    """
    data = {
        f"{role}.yaml": yaml.safe_dump(dict(values), sort_keys=False) if values else "{}\n"
        for role, values in planned.engine_configs.items()
    }
    if planned.chat_template is not None:
        data[CHAT_TEMPLATE] = planned.chat_template
    digest = hashlib.sha256("\0".join(part for item in data.items() for part in item).encode()).hexdigest()[:8]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(planned, f"{planned.target.name}-engine-{digest}"),
        "immutable": True,
        "data": data,
    }


def network_policies(planned: PodPlan) -> list[Manifest]:
    """Returns policies that admit internal traffic only between pods of the topology, and HTTP from the cluster.

    They are needed because the planes of Dynamo 1.6.1 have neither encryption nor authentication in these files.
    """
    target = planned.target
    of_topology = {"matchLabels": {TOPOLOGY_LABEL: target.name}}
    of_frontends = {"matchLabels": {TOPOLOGY_LABEL: target.name, ROLE_LABEL: "frontend"}}
    specs = {
        "internal": {"podSelector": of_topology, "ingress": [{"from": [{"podSelector": of_topology}]}]},
        "http": {"podSelector": of_frontends, "ingress": [{"ports": [{"protocol": "TCP", "port": HTTP_PORT}]}]},
    }
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": _metadata(planned, f"{target.name}-{name}"),
            "spec": {**spec, "policyTypes": ["Ingress"]},
        }
        for name, spec in specs.items()
    ]


def bench_volume(planned: PodPlan) -> Manifest:
    """Returns the volume claim of the benchmark. It is a separate object, so that the report outlives the Job."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(planned, f"{planned.target.name}-bench"),
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": _RUNS_SIZE}}},
    }


def bench_job(planned: PodPlan, words: tuple[str, ...]) -> Manifest:
    """Returns the benchmark Job.

    It waits until every worker is ready, a request has succeeded and KV was transferred in each pair of workers. Then
    it measures once and leaves its run directory.
    """
    target, source = planned.target, planned.source
    variables = [{"name": "PYTHONUNBUFFERED", "value": "1"}, {"name": "HF_HUB_OFFLINE", "value": "1"}]
    mounts, volumes = [source.mount], [source.volume]
    trusts: list[Manifest] = []
    if target.tls_secret:
        variables.append({"name": "SSL_CERT_FILE", "value": f"{TLS_DIRECTORY}/{_CA}"})
        trusts, volumes = [tls_mount()], [*volumes, tls_volume(target.tls_secret, (_CA,))]
    secure = {
        "allowPrivilegeEscalation": False,
        "seccompProfile": {"type": "RuntimeDefault"},
        "capabilities": {"drop": ["ALL"]},
    }
    common = {"image": target.image, "env": variables, "securityContext": secure}
    expected = ",".join(f"{kind.role}={kind.replicas}" for kind in planned.workers)
    wait = {
        "name": "wait",
        **common,
        "command": ["python3", "-m", "trtx.export.wait"],
        "args": [
            *(url(planned), planned.model, "--workers", expected, "--timeout-s", str(_WAIT_S)),
            *("--prove-handoffs", planned.engine),
        ],
    }
    measure = {
        "name": "bench",
        **common,
        "command": ["python3", "-m", "trtx", "bench"],
        "args": [
            *("--url", url(planned), "--model", planned.model, "--tokenizer", str(source.path)),
            *_gpu_count(planned),
            *("--output", RUNS),
            *words,
        ],
        "resources": {"requests": {"cpu": "2"}},
        "volumeMounts": [*mounts, *trusts, {"name": "runs", "mountPath": RUNS}],
    }
    pod: Manifest = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "initContainers": [
            *source.init_containers(target.image, with_weights=False),
            {**wait, "volumeMounts": trusts} if trusts else wait,
        ],
        "containers": [measure],
        "volumes": [*volumes, {"name": "runs", "persistentVolumeClaim": {"claimName": f"{target.name}-bench"}}],
    }
    if target.image_pull_secret:
        pod = {"imagePullSecrets": [{"name": target.image_pull_secret}], **pod}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(planned, f"{target.name}-bench"),
        "spec": {"backoffLimit": 0, "template": {"metadata": {"labels": {ROLE_LABEL: "bench"}}, "spec": pod}},
    }


def _gpu_count(planned: PodPlan) -> tuple[str, ...]:
    """Returns ``--gpu-count`` for engines over several nodes, whose workers can't publish their number of GPUs.

    Otherwise the number that workers publish is used, because it is more accurate than the plan.
    """
    spans = any(kind.pods > 1 for kind in planned.workers)
    return ("--gpu-count", str(planned.gpu_count)) if spans else ()


def url(planned: PodPlan) -> str:
    """Returns the URL of the frontends' Service, as seen from any pod of the cluster."""
    scheme = "https" if planned.target.tls_secret else "http"
    return f"{scheme}://{planned.target.name}-frontend.{planned.target.namespace}.svc:{HTTP_PORT}"


def _metadata(planned: PodPlan, name: str) -> Manifest:
    target = planned.target
    return {"name": name, "namespace": target.namespace, "labels": {TOPOLOGY_LABEL: target.name}}
