"""The environment and the command line of a plan's process in a pod.

``trtx/export/plan_variables.py`` has a row for each variable of a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trtx.export.kubernetes.target import Form, KubernetesTarget
from trtx.export.plan_variables import fate_in_pod
from trtx.topology import ProcessSpec

SYSTEM_PORT = 9090
"""The system port of each worker: the operator's default. Each pod has its own port space."""
HTTP_PORT = 8000
"""The HTTP port of each frontend, which the operator's Service and probes expect."""

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
    "--prompts-template": ("operator", "plain"),
    "--parser-of-calls": ("operator", "plain"),
    "--prompts-by": ("operator", "plain"),
    "--namespace": ("operator",),
}
"""Flags of a plan's command lines, each with one value, that are dropped in pods of these forms."""
NAME_FLAG = "--name"
POD_NAME = "$(POD_NAME)"
"""The kubelet substitutes the pod's name, so that a worker's logs and facts name its pod."""


def variables(process: ProcessSpec, target: KubernetesTarget, gpus: int) -> list[dict[str, Any]]:
    """Returns the ``env`` of the container that runs ``process``. ``gpus``: the GPUs of its pod.

    Raises LookupError for a variable of the plan without a row in :data:`trtx.export.plan_variables.VARIABLES`.
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
    fate = fate_in_pod(name)
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
