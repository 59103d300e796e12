"""Rules for each environment variable and path of a plan in a job, whose nodes are not known when the plan is made.

The plan is made with placeholder addresses, devices and directories, which are replaced by variables of the script. An
environment variable without a rule is an error, so that a new variable in ``topology`` is not passed on by accident.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from trtx.export.slurm.spec import JobSpec
from trtx.export.slurm.words import Shell
from trtx.topology import ProcessSpec

ADDRESSES = tuple(f"192.0.2.{index}" for index in range(1, 255))
"""Placeholder addresses from RFC 5737, which are reserved for documentation and never assigned to a machine."""
DEVICE = "trtx0"
RUN_DIR = Path("/stand-in-for-the-run")
SCRATCH_DIR = Path("/stand-in-for-the-node")

KEPT = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",  # empty for frontends; for workers see _CHOSEN
        "DYN_CANARY_WAIT_TIME",
        "DYN_DISABLE_FRONTEND_ADMIN_API",
        "DYN_DISCOVERY_BACKEND",
        "DYN_EVENT_PLANE",
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS",
        "DYN_HEALTH_CHECK_ENABLED",
        "DYN_HEALTH_CHECK_REQUEST_TIMEOUT",
        "DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS",
        "DYN_HTTP_BODY_LIMIT_MB",
        "DYN_LOG",
        "DYN_REQUEST_PLANE",
        "DYN_SDK_DISABLE_ANSI_LOGGING",
        "DYN_SYSTEM_PORT",
        "DYN_TCP_MAX_MESSAGE_SIZE",
        "DYN_TCP_RESPONSE_STREAM_PORT",
        "DYN_TCP_RPC_PORT",
        "ETCD_LEASE_TTL",
        "HF_HUB_OFFLINE",
        "PYTHONUNBUFFERED",
        "UCX_TCP_PORT_RANGE",
    }
)
"""Variables of a plan that are valid in a job unchanged."""
REPLACED: Mapping[str, Shell] = {
    "DYN_NAMESPACE": Shell("${NAMESPACE}"),
    "DYN_SYSTEM_HOST": Shell("${ADDRESS}"),
    "DYN_TCP_RPC_HOST": Shell("${ADDRESS}"),
    "ETCD_ENDPOINTS": Shell("http://${HEAD}:${REGISTRY_PORT}"),
    "NATS_SERVER": Shell("nats://${HEAD}:${EVENTS_PORT}"),
    "TMPDIR": Shell("${LOCAL}"),
    "TRTX_TOPOLOGY": Shell("${NAMESPACE}"),
    "UCX_NET_DEVICES": Shell("${DEVICE}"),
}
"""Variables of a plan whose values are known only on the node."""
_CHOSEN = "CUDA_VISIBLE_DEVICES"  # for workers, the script selects from the GPUs that Slurm allocates to the job
_FLAGS: Mapping[str, Shell] = {
    "--http-host": Shell("${ADDRESS}"),
    "--model": Shell("${MODEL}"),
    "--namespace": Shell("${NAMESPACE}"),
}
"""Flags of a plan's command lines whose values are variables of the script."""


def variables(process: ProcessSpec, job: JobSpec) -> dict[str, str]:
    """Returns the environment of ``process`` in a job. Raises LookupError for a variable without a rule."""
    environment: dict[str, str] = {}
    for name, value in process.env.items():
        if name in REPLACED:
            environment[name] = REPLACED[name]
        elif name not in KEPT:
            raise LookupError(
                f"{name} of the plan stands in no row of trtx/export/slurm/stand_ins.py: say there what becomes of it"
            )
        elif name != _CHOSEN or process.role == "frontend":
            environment[name] = value
    if job.ucx_devices is not None and "UCX_NET_DEVICES" in environment:
        environment["UCX_NET_DEVICES"] = job.ucx_devices
    _check_no_stand_in(process, environment.values())
    return environment


def arguments(process: ProcessSpec) -> list[str]:
    """Returns the command of ``process`` in a job."""
    words: list[str] = [Shell("${PYTHON}")]
    before = ""
    for word in process.argv[1:]:
        if before in _FLAGS:
            words.append(_FLAGS[before])
        elif before == "--engine-config":
            words.append(Shell("${TRTX_RUN}/configs/" + f"{process.role}.yaml"))
        elif before == "--status-file":
            words.append(Shell("${TRTX_RUN}/status/" + f"{process.name}.json"))
        else:
            words.append(word)
        before = word
    if process.role != "frontend":
        words += ["--drain-seconds", Shell("${DRAIN_SECONDS}")]
    _check_no_stand_in(process, words)
    return words


def _check_no_stand_in(process: ProcessSpec, words: Iterable[str]) -> None:
    stand_ins = (str(RUN_DIR), str(SCRATCH_DIR), DEVICE, *ADDRESSES[:1])
    for word in words:
        if not isinstance(word, Shell) and any(one in word for one in stand_ins):
            raise LookupError(
                f"{process.name} would get {word!r}, a stand-in: replace it in trtx/export/slurm/stand_ins.py"
            )
