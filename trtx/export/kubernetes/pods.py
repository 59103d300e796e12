"""Pod templates, which are the same in both forms except for the parts that Dynamo's operator adds itself."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from trtx.export.kubernetes.planning import CONFIG_DIRECTORY, TLS_DIRECTORY, PodKind, PodPlan
from trtx.export.kubernetes.variables import HTTP_PORT, SYSTEM_PORT

Manifest = dict[str, Any]

TOPOLOGY_LABEL, ROLE_LABEL = "trtx-topology", "trtx-role"
"""trtx's own labels, because the operator's labels depend on how it starts the pods."""
_DRAIN_S, _SHUTDOWN_S, _MARGIN_S = 30, 60, 30
WORKER_GRACE_S = _DRAIN_S + _SHUTDOWN_S + _MARGIN_S
"""The time from SIGTERM to SIGKILL: the worker's ``--drain-seconds`` and ``--shutdown-seconds``, plus a margin."""
_FRONTEND_CPU = "1"
_GPU = "nvidia.com/gpu"
_CONFIGS, _TLS, _SHM = "engine-configs", "tls", "shared-memory"


def pod_template(planned: PodPlan, kind: PodKind, config_map: str) -> Manifest:
    """Returns the template of all pods of ``kind``. ``config_map``: the name of the engine configs' ConfigMap."""
    spec: Manifest = {"terminationGracePeriodSeconds": WORKER_GRACE_S} if kind.is_worker else {}
    target = planned.target
    if target.form == "plain":
        spec["serviceAccountName"] = f"{target.name}-{'worker' if kind.is_worker else 'frontend'}"
    if target.image_pull_secret:
        spec["imagePullSecrets"] = [{"name": target.image_pull_secret}]
    if kind.is_worker and target.node_selector:
        spec["nodeSelector"] = target.selector
    if kind.is_worker and (fetching := planned.source.init_containers(target.image)):
        spec["initContainers"] = fetching
    spec["containers"] = [_container(planned, kind)]
    if volumes := _volumes(planned, kind, config_map):
        spec["volumes"] = volumes
    return {"metadata": {"labels": labels(planned, kind.role)}, "spec": spec}


def labels(planned: PodPlan, role: str) -> dict[str, str]:
    return {TOPOLOGY_LABEL: planned.target.name, ROLE_LABEL: role}


def _container(planned: PodPlan, kind: PodKind) -> Manifest:
    is_plain = planned.target.form == "plain"
    container: Manifest = {
        "name": "main",
        "image": planned.target.image,
        "command": list(kind.command),
        "args": list(kind.arguments),
        "env": [dict(entry) for entry in kind.variables],
    }
    if is_plain:
        port = {"name": "system", "containerPort": SYSTEM_PORT} if kind.is_worker else _http_port()
        container["ports"] = [port]
    container["resources"] = _resources(planned, kind)
    if kind.is_worker and is_plain:
        container |= _worker_probes()
    elif not kind.is_worker:
        container |= _frontend_probes(planned)
    container["securityContext"] = _security(planned, kind)
    if mounts := _mounts(planned, kind):
        container["volumeMounts"] = mounts
    return container


def _http_port() -> Manifest:
    return {"name": "http", "containerPort": HTTP_PORT}


def _resources(planned: PodPlan, kind: PodKind) -> Manifest:
    if not kind.is_worker:
        return {"requests": {"cpu": _FRONTEND_CPU}}
    requests = {"cpu": planned.target.cpu}
    if planned.target.memory:
        requests["memory"] = planned.target.memory
    limits = dict(planned.target.further_limits)
    if kind.gpus:
        limits = {_GPU: str(kind.gpus), **limits}
    return {"requests": requests, "limits": limits} if limits else {"requests": requests}


def _security(planned: PodPlan, kind: PodKind) -> Manifest:
    """Returns the security context of a container.

    The pods of an engine over several nodes keep all privileges, because sshd and mpirun change users.
    """
    if kind.pods > 1:
        return {"seccompProfile": {"type": "RuntimeDefault"}}
    security: Manifest = {"allowPrivilegeEscalation": False, "seccompProfile": {"type": "RuntimeDefault"}}
    if kind.is_worker and any(name.startswith("rdma/") for name in planned.target.further_limits):
        security["capabilities"] = {"add": ["IPC_LOCK"]}
    elif not kind.is_worker:
        security["capabilities"] = {"drop": ["ALL"]}
    return security


def _get(path: str, port: int, scheme: str = "HTTP") -> Manifest:
    return {"httpGet": {"path": path, "port": port, "scheme": scheme}}


def _worker_probes() -> Manifest:
    """Returns the operator's own probes, changed so that a single slow response does not restart a worker."""
    return {
        "startupProbe": {
            **_get("/live", SYSTEM_PORT),
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 720,
        },
        "livenessProbe": {**_get("/live", SYSTEM_PORT), "periodSeconds": 5, "timeoutSeconds": 4, "failureThreshold": 6},
        "readinessProbe": {
            **_get("/health", SYSTEM_PORT),
            "periodSeconds": 5,
            "timeoutSeconds": 4,
            "failureThreshold": 1,
        },
    }


def _frontend_probes(planned: PodPlan) -> Manifest:
    scheme = "HTTPS" if planned.target.tls_secret else "HTTP"
    serves = f"/v1/models/{quote(planned.model, safe='')}"
    return {
        "startupProbe": {
            **_get("/live", HTTP_PORT, scheme),
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 150,
        },
        "livenessProbe": {
            **_get("/live", HTTP_PORT, scheme),
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        "readinessProbe": {
            **_get(serves, HTTP_PORT, scheme),
            "periodSeconds": 5,
            "timeoutSeconds": 4,
            "failureThreshold": 2,
        },
    }


def _mounts(planned: PodPlan, kind: PodKind) -> list[Manifest]:
    if not kind.is_worker:
        return [tls_mount()] if planned.target.tls_secret else []
    mounts = [planned.source.mount, {"name": _CONFIGS, "mountPath": str(CONFIG_DIRECTORY), "readOnly": True}]
    if planned.target.form == "plain":
        mounts.append({"name": _SHM, "mountPath": "/dev/shm"})
    return mounts


def _volumes(planned: PodPlan, kind: PodKind, config_map: str) -> list[Manifest]:
    target = planned.target
    if not kind.is_worker:
        return [tls_volume(target.tls_secret, ("tls.crt", "tls.key"))] if target.tls_secret else []
    volumes = [planned.source.volume, {"name": _CONFIGS, "configMap": {"name": config_map}}]
    if target.form == "plain":
        volumes.append({"name": _SHM, "emptyDir": {"medium": "Memory", "sizeLimit": target.shared_memory}})
    return volumes


def tls_mount() -> Manifest:
    return {"name": _TLS, "mountPath": TLS_DIRECTORY, "readOnly": True}


def tls_volume(secret: str, keys: tuple[str, ...]) -> Manifest:
    return {"name": _TLS, "secret": {"secretName": secret, "items": [{"key": key, "path": key} for key in keys]}}
