"""Rules for each environment variable and flag of a plan in a pod.

A plan is made for one machine, while each pod is its own host.
A variable without a rule is an error, so that a new variable in ``topology`` is neither lost nor passed on by accident.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from trtx.export.kubernetes.target import Form, KubernetesTarget
from trtx.topology import ProcessSpec

SYSTEM_PORT = 9090
"""The system port of each worker: the operator's default. Each pod has its own port space."""
HTTP_PORT = 8000
"""The HTTP port of each frontend, which the operator's Service and probes expect."""

Fate = Literal[
    "kept", "dropped", "pod address", "visible GPUs", "UCX devices", "event plane", "plain only", "operator's"
]

FATES: Mapping[str, Fate] = {
    "TRTX_TOPOLOGY": "kept",
    "DYN_NAMESPACE": "plain only",
    "DYN_DISCOVERY_BACKEND": "operator's",
    "DYN_FILE_KV": "dropped",
    "DYN_REQUEST_PLANE": "kept",
    "DYN_EVENT_PLANE": "event plane",
    "DYN_TCP_RPC_HOST": "pod address",
    "DYN_TCP_RESPONSE_STREAM_HOST": "dropped",
    "DYN_ZMQ_BROKER_URL": "dropped",
    "DYN_LOG": "kept",
    "DYN_SDK_DISABLE_ANSI_LOGGING": "kept",
    "HF_HUB_OFFLINE": "kept",
    "PYTHONUNBUFFERED": "kept",
    "TMPDIR": "dropped",
    "DYN_TCP_MAX_MESSAGE_SIZE": "kept",
    "DYN_TCP_REQUEST_TIMEOUT": "dropped",
    "CUDA_VISIBLE_DEVICES": "visible GPUs",
    "DYN_DISABLE_FRONTEND_ADMIN_API": "kept",
    "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": "kept",
    "DYN_HTTP_BODY_LIMIT_MB": "kept",
    "DYN_SYSTEM_HOST": "pod address",
    "DYN_SYSTEM_PORT": "operator's",
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "dropped",
    "DYN_HEALTH_CHECK_ENABLED": "operator's",
    "DYN_CANARY_WAIT_TIME": "dropped",
    "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": "dropped",
    "UCX_NET_DEVICES": "UCX devices",
    "OMP_NUM_THREADS": "kept",
    "MKL_NUM_THREADS": "kept",
}
"""The rule for each variable that :mod:`trtx.topology.commands` sets. docs/kubernetes.md has the reasons."""
_OPERATORS = {  # the operator sets these itself; the plain form must set them
    "DYN_DISCOVERY_BACKEND": "kubernetes",
    "DYN_SYSTEM_PORT": str(SYSTEM_PORT),
    "DYN_HEALTH_CHECK_ENABLED": "false",
}
_IDENTITY = {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "POD_UID": "metadata.uid"}

FLAGS_DROPPED: Mapping[str, tuple[Form, ...]] = {
    "--broker-xsub": ("operator", "plain"),
    "--broker-xpub": ("operator", "plain"),
    "--status-file": ("operator", "plain"),
    "--prompts-of": ("operator", "plain"),  # frontends' pods have no model files
    "--prompts-by": ("operator", "plain"),
    "--namespace": ("operator",),
}
"""Flags of a plan's command lines, each with one value, that are dropped in pods of these forms."""
NAME_FLAG = "--name"
POD_NAME = "$(POD_NAME)"
"""The kubelet substitutes the pod's name, so that a worker's logs and facts name its pod."""


def variables(process: ProcessSpec, target: KubernetesTarget, gpus: int) -> list[dict[str, Any]]:
    """Returns the ``env`` of the container that runs ``process``. ``gpus``: the GPUs of its pod.

    Raises LookupError for a variable of the plan without a rule in :data:`FATES`.
    """
    is_plain = target.form == "plain"
    entries: list[dict[str, Any]] = []
    if is_plain:
        entries += [_from_field(name, field) for name, field in _IDENTITY.items()]
    for name, value in process.env.items():
        entries += _variable(name, value, target, gpus, is_worker=process.role != "frontend")
    return entries


def _variable(
    name: str, value: str, target: KubernetesTarget, gpus: int, *, is_worker: bool
) -> Iterator[dict[str, Any]]:
    try:
        fate = FATES[name]
    except KeyError:
        raise LookupError(
            f"{name} of the plan has no row in FATES of trtx/export/kubernetes/variables.py: say there what becomes "
            "of it in a pod"
        ) from None
    is_plain = target.form == "plain"
    if fate == "kept" or (fate == "plain only" and is_plain):
        yield _of_value(name, value)
    elif fate == "pod address":
        yield _from_field(name, "status.podIP")
    elif fate == "visible GPUs":
        yield _of_value(name, ",".join(map(str, range(gpus))) if is_worker else "")
    elif fate == "UCX devices":
        yield _of_value(name, target.ucx_devices)
    elif fate == "event plane":
        yield _of_value(name, "nats" if target.nats else "zmq")
        if target.nats:
            yield _of_value("NATS_SERVER", target.nats)
    elif fate == "operator's" and is_plain:
        yield _of_value(name, _OPERATORS[name])


def arguments(process: ProcessSpec, form: Form) -> list[str]:
    """Returns the arguments after ``python3 -m MODULE`` of ``process`` in a pod.

    ``$(…)`` in them is escaped, because Kubernetes would replace it by a variable.
    """
    words = iter(process.argv[3:])
    kept: list[str] = []
    for word in words:
        if form in FLAGS_DROPPED.get(word, ()):
            next(words)
        elif word == NAME_FLAG:
            next(words)
            kept += [word, POD_NAME]
        else:
            kept.append(word.replace("$(", "$$("))
    return kept


def module_of(argv: Sequence[str]) -> list[str]:
    """Returns ``python3 -m MODULE``, which uses the image's interpreter."""
    if argv[1] != "-m":
        raise LookupError(f"a plan starts {argv[:3]}; expected python -m MODULE")
    return ["python3", "-m", argv[2]]


def _of_value(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value.replace("$(", "$$(")}


def _from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
