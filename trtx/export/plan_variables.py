"""The table of how a pod and a Slurm job treat each environment variable of a plan: one row per variable.

``trtx/topology/commands.py`` sets the variables for processes that trtx starts itself. A pod has the plan of one
machine, but each pod is a host of its own. A job has the plan of several hosts, whose nodes are known only when it
runs. A variable without a row is an error, so that a new variable is neither lost nor passed on by accident. ``make
reference`` writes the table of docs/kubernetes.md from these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Fate = Literal[
    "kept",  # its value in the plan
    "dropped",
    "pod address",
    "visible GPUs",
    "UCX devices",
    "event plane",
    "plain only",  # Dynamo's operator sets it differently
    "operator's",  # Dynamo's operator sets it; the plain form sets the same value
]
"""What becomes of a variable in a pod."""
Job = Literal["kept", "${ADDRESS}", "${DEVICE}", "${LOCAL}", "${NAMESPACE}", "etcd", "NATS", "chosen on the node"]
"""What becomes of a variable in a Slurm job: its value in the plan, or a variable of the script."""


@dataclass(frozen=True, slots=True)
class PlanVariable:
    """The row of one variable. None: a pod's plan, or a job's plan, never contains the variable."""

    pod: Fate | None
    job: Job | None
    why: str


VARIABLES: Mapping[str, PlanVariable] = {
    "TRTX_TOPOLOGY": PlanVariable("kept", "${NAMESPACE}", "names the topology that a process belongs to"),
    "DYN_NAMESPACE": PlanVariable(
        "plain only",
        "${NAMESPACE}",
        "keeps topologies apart; the operator makes its own namespace, with a suffix during updates",
    ),
    "DYN_DISCOVERY_BACKEND": PlanVariable("operator's", "kept", "`kubernetes` in pods, `etcd` in a job"),
    "DYN_FILE_KV": PlanVariable("dropped", None, "the directory of discovery on one machine"),
    "ETCD_ENDPOINTS": PlanVariable(None, "etcd", "the job's own etcd, on its first node"),
    "ETCD_LEASE_TTL": PlanVariable(None, "kept", "`--lease-ttl-s`"),
    "DYN_REQUEST_PLANE": PlanVariable("kept", "kept", "`tcp`; all processes must agree"),
    "DYN_EVENT_PLANE": PlanVariable(
        "event plane", "kept", "`zmq`, or `nats` with `--nats` and in a job; all processes must agree"
    ),
    "DYN_ZMQ_BROKER_URL": PlanVariable("dropped", None, "the event broker of one machine"),
    "NATS_SERVER": PlanVariable(None, "NATS", "the job's own NATS, on its first node; in pods that of `--nats`"),
    "DYN_TCP_RPC_HOST": PlanVariable("pod address", "${ADDRESS}", "the address that other processes connect to"),
    "DYN_TCP_RPC_PORT": PlanVariable(None, "kept", "a port of the range that begins at `--first-port`"),
    "DYN_TCP_RESPONSE_STREAM_HOST": PlanVariable("pod address", "${ADDRESS}", "where a frontend waits for answers"),
    "DYN_TCP_RESPONSE_STREAM_PORT": PlanVariable(None, "kept", "a port of the range that begins at `--first-port`"),
    "DYN_TCP_REQUEST_TIMEOUT": PlanVariable(
        "dropped", None, "Dynamo's own 5 s stay, so that frontends notice a lost node"
    ),
    "DYN_TCP_MAX_MESSAGE_SIZE": PlanVariable(
        "kept", "kept", "see [Dynamo](upstream/dynamo.md#large-requests-and-busy-workers)"
    ),
    "DYN_HTTP_BODY_LIMIT_MB": PlanVariable("kept", "kept", "the largest body of a request, from `--max-media-bytes`"),
    "DYN_MM_MAX_DATA_URL_MB": PlanVariable("kept", "kept", "the largest `data:` URL, which is the body's limit"),
    "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS": PlanVariable("kept", "kept", "ends streams of workers that went away"),
    "DYN_DISABLE_FRONTEND_ADMIN_API": PlanVariable("kept", "kept", "the HTTP port has no admin routes"),
    "DYN_SYSTEM_HOST": PlanVariable(
        "pod address", "${ADDRESS}", "frontends fetch a model's description from this address of a worker"
    ),
    "DYN_SYSTEM_PORT": PlanVariable("operator's", "kept", "9090 in pods, as the operator sets it"),
    "OTEL_EXPORT_ENABLED": PlanVariable("kept", "kept", "`1` with `--otlp-endpoint`: processes send traces"),
    "OTEL_SERVICE_NAME": PlanVariable("kept", "kept", "names the process in a trace"),
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": PlanVariable("kept", "kept", "from `--otlp-endpoint`"),
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": PlanVariable("kept", "kept", "OTLP over HTTP"),
    "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": PlanVariable("kept", "kept", "Dynamo exports its logs where it exports spans"),
    "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": PlanVariable("kept", "kept", "OTLP over HTTP"),
    "DYN_HEALTH_CHECK_ENABLED": PlanVariable(
        "operator's", "kept", "no canary requests in pods, as the operator sets it"
    ),
    "DYN_CANARY_WAIT_TIME": PlanVariable("dropped", "kept", "there are no canary requests in pods"),
    "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": PlanVariable("dropped", "kept", "there are no canary requests in pods"),
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": PlanVariable(
        "dropped",
        "kept",
        "Dynamo's own 5 s stay, as frontends learn of a leaving pod half a second late; an encode worker sets 0 itself",
    ),
    "DYN_LOG": PlanVariable("kept", "kept", "`--log-level`; warnings and errors by default"),
    "DYN_LOGGING_JSONL": PlanVariable("kept", "kept", "`--log-format`; text by default"),
    "DYN_SDK_DISABLE_ANSI_LOGGING": PlanVariable("kept", "kept", "logs without colours"),
    "PYTHONUNBUFFERED": PlanVariable("kept", "kept", "logs appear as they are written"),
    "HF_HUB_OFFLINE": PlanVariable("kept", "kept", "a missing file is an error at once, not a request to the hub"),
    "TMPDIR": PlanVariable("dropped", "${LOCAL}", "a directory of the node; a pod has its own `/tmp`"),
    "CUDA_VISIBLE_DEVICES": PlanVariable(
        "visible GPUs", "chosen on the node", "all GPUs of the pod; in a job, the worker's share of the job's GPUs"
    ),
    "UCX_NET_DEVICES": PlanVariable(
        "UCX devices",
        "${DEVICE}",
        "`--ucx-devices`; on `lo`, the KV of every handoff between pods is computed again, and requests still succeed",
    ),
    "UCX_TCP_PORT_RANGE": PlanVariable(None, "kept", "ports of the range that begins at `--first-port`"),
    "OMP_NUM_THREADS": PlanVariable("kept", None, "on a CPU, as many as the pod requests; a job sets its own"),
    "MKL_NUM_THREADS": PlanVariable("kept", None, "on a CPU, as many as the pod requests; a job sets its own"),
}


def fate_in_pod(name: str) -> Fate:
    """Returns how a pod treats a variable. Raises LookupError for a variable without a row."""
    if (row := VARIABLES.get(name)) is None or row.pod is None:
        raise LookupError(_lacks(name, "pod"))
    return row.pod


def fate_in_job(name: str) -> Job:
    """Returns how a Slurm job treats a variable. Raises LookupError for a variable without a row."""
    if (row := VARIABLES.get(name)) is None or row.job is None:
        raise LookupError(_lacks(name, "job"))
    return row.job


def _lacks(name: str, place: str) -> str:
    return (
        f"{name} of the plan has no {place}= in VARIABLES of trtx/export/plan_variables.py: add a row that says what "
        f"becomes of it in a pod and in a Slurm job, then make goldens"
    )
